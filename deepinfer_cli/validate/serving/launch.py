"""`vllm serve` in processes that were prepared: the small model's weights, and another compute capability.

    python launch.py REQUEST serve MODEL...

REQUEST is a JSON file, as `e2e/child.py` reads it. Worker processes that vLLM starts by spawning run this file as
`__mp_main__` and are prepared alike; forked ones inherit it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_CHILD = _HERE.parent / "e2e" / "child.py"


def prepare(request: str) -> None:
    """What `e2e/child.py` does before its engine starts."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
    spec = importlib.util.spec_from_file_location("deepinfer_e2e_child", _CHILD)
    assert spec is not None and spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = child
    spec.loader.exec_module(child)
    child.prepare(json.loads(Path(request).read_text(encoding="utf-8")))


def main() -> None:
    """Becomes `vllm serve`."""
    given = list(sys.argv)
    prepare(given[1])
    _give_to_spawned(given)
    sys.argv = [given[0], *given[2:]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def _give_to_spawned(arguments: list[str]) -> None:
    """Spawned processes get these arguments, which name the request, and not those that vLLM reads."""
    stock = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return stock(name) | {"sys_argv": arguments}

    spawn.get_preparation_data = get_preparation_data


if __name__ == "__main__":
    main()
if __name__ == "__mp_main__":
    prepare(sys.argv[1])
