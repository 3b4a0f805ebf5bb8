"""`vllm serve` in processes that were prepared: the small model's weights, and another compute capability.

    python launch.py REQUEST serve MODEL...

REQUEST is a JSON file, as `e2e/child.py` reads it. Worker processes that vLLM starts by spawning run this file as
`__mp_main__` and are prepared alike; forked ones inherit it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

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
    prepare(sys.argv[1])
    # a spawned process is given these arguments, and looks for the request in the first
    sys.argv = sys.argv[1:]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
if __name__ == "__mp_main__":
    prepare(sys.argv[0])
