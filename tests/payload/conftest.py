"""A fresh payload under either of its names, and vLLM modules made of real signatures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

PAYLOAD = Path(__file__).parents[2] / "overlays" / "deepinfer_sm80"
SWITCHES = ("DEEPINFER_DISABLE", "DEEPINFER_DISABLE_OPS", "DEEPINFER_FORCE_ARCH")
NAMES = ("deepinfer_sm80", "vllm.deepinfer_sm80")
CACHE_UTILS = "vllm.models.deepseek_v41.common.ops.cache_utils"
ROCM = "vllm.models.deepseek_v41.amd.rocm"
SPARSE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
MHC = "vllm.model_executor.kernels.mhc.tilelang"
WARMUP = "vllm.model_executor.kernels.mhc.warmup"
GATHER = "dequantize_and_gather_k_cache"
COMBINE = "combine_topk_swa_indices"
BUILD = "build_ragged_indices_from_dense"
PREFILL = "rocm_sparse_attn_prefill"
DECODE = "rocm_sparse_attn_decode"


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
        self.result: Any = "result"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.calls.append(dict(bound.arguments))
        return self.result


def gather_contract(
    out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, max_gather_len=None
): ...


# fmt: off
def combine_contract(
    topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, *,
    replay_clamp, width_cap, out=None,
): ...
def sparse_prefill_contract(q, kv, out, scale, sink, *, indices, lengths=None, indptr=None): ...
def sparse_decode_contract(
    q, out, swa_cache, swa_indices, swa_indptr, scale, sink, *, extra_cache=None, extra_indices=None,
    extra_indptr=None, positions=None, cos_sin_cache=None,
): ...
def mhc_pre_delayed_contract(
    residual, fn, hc_scale, hc_base, mixing, *, pre_mix=None, x=None, norm_weight=None, norm_eps=1e-6,
): ...
def mhc_fused_post_pre_delayed_contract(
    x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, mixing, *, pre_mix=None, norm_weight=None,
    norm_eps=1e-6, capture_aux=False,
): ...
# fmt: on


def build_ragged_contract(indices, lengths, num_rows=-1, *, compact): ...


def mhc_post_contract(x, residual, post_layer_mix, comb_res_mix): ...


# op → what its public function is called, and the parameters that the adapters rely on
CONTRACTS = {
    "gather": ("gather", gather_contract),
    "combine": ("combine", combine_contract),
    "ragged": ("build_ragged", build_ragged_contract),
    "sparse_prefill": ("sparse_prefill", sparse_prefill_contract),
    "sparse_decode": ("sparse_decode", sparse_decode_contract),
    "mhc_post": ("mhc_post", mhc_post_contract),
    "mhc_pre_delayed": ("mhc_pre_delayed", mhc_pre_delayed_contract),
    "mhc_fused_post_pre_delayed": ("mhc_fused_post_pre_delayed", mhc_fused_post_pre_delayed_contract),
}


@pytest.fixture
def ops(payload: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Recorders in the place of the ops; `warmed`: what was asked to be compiled, `first`: at which calls."""
    made = SimpleNamespace(warmed=[], first=[])
    for op, (name, contract) in CONTRACTS.items():
        setattr(made, op, Recorder(contract))
        module = ModuleType(f"{payload.__name__}.ops.{op}")
        setattr(module, name, getattr(made, op))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    warm = ModuleType(f"{payload.__name__}.warm")
    vars(warm)["up"] = lambda hidden=None: made.warmed.append(hidden)
    vars(warm)["first_call"] = made.first.append
    monkeypatch.setitem(sys.modules, warm.__name__, warm)
    monkeypatch.setattr(payload, "warm", warm, raising=False)
    return made


class Argument:
    """A value that is only equal to itself: a tensor of V4.1's shapes that every conversion leaves as it is."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "q": (6, 64, 512),
        "output": (6, 64, 512),
        "kv": (900, 1, 512),
        "residual": (6, 4, 5120),
        "inv_rope_cos_sin_cache": (4096, 64),
    }

    def __init__(self, name: str, *, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> None:
        self.name = name
        self.shape = shape or self.SHAPES.get(name, (4, 32, 584))
        self.dtype = dtype or ("float32" if name == "inv_rope_cos_sin_cache" else "bfloat16")

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int) -> int:
        return 1

    def _same(self, *_args: Any, **_kwargs: Any) -> Argument:
        return self

    reshape = squeeze = to = contiguous = float = _same


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtypes that `Argument` has, in the place of torch."""
    names = ("bfloat16", "float32", "int32", "int64")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**{name: name for name in names}))


@pytest.fixture
def release_tree(pristine_release: Callable[[str], Path]) -> Callable[[str], Path]:
    """Version → the `vllm` folder of that real release, never written to."""
    return lambda version: pristine_release(version) / "vllm"


def stub(name: str, parameters: str, names: Iterable[str] = ()) -> str:
    """Source of a stock function that says what it was called with; it also names `names`, and does not look at them."""
    mention = "".join(f"        {one}\n" for one in names)
    head = f"    if not locals():\n{mention}" if mention else ""
    return f"def {name}({parameters}):\n{head}    return 'stock', dict(locals())\n"


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a release's file; releases do not change."""
    return ast.parse(file.read_text(encoding="utf-8"))


def real_stub(file: Path, name: str) -> str:
    """The same with the parameters that `file` gives the function or method `name`; annotations dropped.

    It also names every global that the real body names: that is what tells two contracts of one signature apart.
    """
    node = definition(file, name)
    if node is None:
        raise LookupError(f"{name} is not defined in {file}")
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for argument in every:
        argument.annotation = None
    known = {argument.arg for argument in every}
    named = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    outer, _, last = name.rpartition(".")
    body = stub(last, ast.unparse(node.args), sorted(named - known))
    if not outer:
        return body
    return f"class {outer}:\n" + "".join(f"    {line}\n" for line in body.splitlines())


def definition(file: Path, name: str) -> ast.FunctionDef | None:
    """The function or `Class.method` that `file` defines (it may import one instead)."""
    outer, _, last = name.rpartition(".")
    body: list[ast.stmt] = parsed(file).body
    if outer:
        body = [
            one for node in body if isinstance(node, ast.ClassDef) and node.name == outer for one in node.body
        ]
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == last), None)


def defines(file: Path, name: str) -> bool:
    """Whether `file` defines the function or method `name`."""
    return definition(file, name) is not None
