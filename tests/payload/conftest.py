"""A fresh payload under either of its names, and vLLM modules made of real signatures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PAYLOAD = Path(__file__).parents[2] / "overlays" / "deepinfer_sm80"
SWITCHES = ("DEEPINFER_DISABLE", "DEEPINFER_DISABLE_OPS", "DEEPINFER_FORCE_ARCH")
NAMES = ("deepinfer_sm80", "vllm.deepinfer_sm80")
CACHE_UTILS = "vllm.models.deepseek_v41.common.ops.cache_utils"
ROCM = "vllm.models.deepseek_v41.amd.rocm"
GATHER = "dequantize_and_gather_k_cache"
COMBINE = "combine_topk_swa_indices"


class Platform:
    """What vLLM's `current_platform` answers; `cards` are the capabilities of the visible devices."""

    def __init__(self, *cards: tuple[int, int] | None, cuda: bool = True) -> None:
        self.cards = cards
        self.cuda = cuda
        self.asked: list[int] = []

    def is_cuda(self) -> bool:
        return self.cuda

    def get_device_capability(self, device_id: int = 0) -> SimpleNamespace | None:
        self.asked.append(device_id)
        card = self.cards[device_id]
        return None if card is None else SimpleNamespace(major=card[0], minor=card[1])


class LoadedVllm:
    """`vllm` in sys.modules: a package in `folder`, a platform, and modules whose bodies the test gives."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "vllm"
        self.root.mkdir()
        self._monkeypatch = monkeypatch
        self.package = self._add("vllm", __version__="0.33.0", __path__=[str(self.root)])
        self.platforms = self._add("vllm.platforms", current_platform=Platform((8, 0)))

    def _add(self, name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def use(self, platform: Platform) -> Platform:
        self.platforms.current_platform = platform
        return platform

    def module(self, name: str, source: str) -> ModuleType:
        """A module `name` whose body is `source`, as if it had just been imported up to its hook."""
        module = self._add(name)
        exec(source, vars(module))
        return module


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedVllm:
    return LoadedVllm(tmp_path, monkeypatch)


@pytest.fixture(params=NAMES)
def payload(request: pytest.FixtureRequest, vllm: LoadedVllm) -> Iterator[ModuleType]:
    """The payload, imported anew under the name it has in a target and the one it has outside."""
    name = request.param
    before = {key: sys.modules.pop(key) for key in list(sys.modules) if f"{key}.".startswith(f"{name}.")}
    spec = importlib.util.spec_from_file_location(
        name, PAYLOAD / "__init__.py", submodule_search_locations=[str(PAYLOAD)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    for key in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
        del sys.modules[key]
    sys.modules.update(before)


class Recorder:
    """Stands for an op: same parameters, keeps what it was called with."""

    def __init__(self, like: Callable[..., Any]) -> None:
        self._signature = inspect.signature(like)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.calls.append(dict(bound.arguments))
        return "result"


def gather_contract(
    out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, max_gather_len=None
): ...


# fmt: off
def combine_contract(
    topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, *,
    replay_clamp, width_cap, out=None,
): ...
# fmt: on


@pytest.fixture
def ops(payload: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Recorders in the place of the two ops."""
    made = SimpleNamespace(gather=Recorder(gather_contract), combine=Recorder(combine_contract))
    for name in ("gather", "combine"):
        module = ModuleType(f"{payload.__name__}.ops.{name}")
        setattr(module, name, getattr(made, name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.fixture
def release_tree(pristine_release: Callable[[str], Path]) -> Callable[[str], Path]:
    """Version → the `vllm` folder of that real release, never written to."""
    return lambda version: pristine_release(version) / "vllm"


def stub(name: str, parameters: str) -> str:
    """Source of a stock function that says what it was called with."""
    return f"def {name}({parameters}):\n    return 'stock', dict(locals())\n"


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a release's file; releases do not change."""
    return ast.parse(file.read_text(encoding="utf-8"))


def real_stub(file: Path, name: str) -> str:
    """The same with the parameters that `file` gives the top-level function `name`; annotations dropped."""
    for node in parsed(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in every:
                argument.annotation = None
            return stub(name, ast.unparse(node.args))
    raise LookupError(f"{name} is not defined in {file}")


def defines(file: Path, name: str) -> bool:
    """Whether `file` defines the top-level function `name` (it may import one instead)."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in parsed(file).body)
