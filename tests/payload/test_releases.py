"""Every adapter against the signatures and call expressions of the four real releases."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import (
    CACHE_UTILS,
    COMBINE,
    GATHER,
    ROCM,
    combine_contract,
    defines,
    gather_contract,
    parsed,
    real_stub,
)

CALLERS = ("amd/rocm.py", "nvidia/flashmla.py", "nvidia/flash_mla_mega_attn.py")
FILES = {CACHE_UTILS: "common/ops/cache_utils.py", ROCM: "amd/rocm.py"}
OPS = {GATHER: "gather", COMBINE: "combine"}
# what each place of definition promises, by release (the op's own docstring says what the flags mean)
CONTRACTS = {
    (CACHE_UTILS, "0.30.0"): {"replay_clamp": False, "width_cap": False},
    (ROCM, "0.30.0"): {"replay_clamp": False, "width_cap": True},
    (ROCM, "0.31.0"): {"replay_clamp": False, "width_cap": True},
}
COMMON = {"replay_clamp": True, "width_cap": False}
IMAGES = ("left_visible", "right_visible", "max_image_tokens")
pytestmark = pytest.mark.release


@dataclass(frozen=True)
class Call:
    """One call expression of a release: how it passes its arguments, and where."""

    where: str
    positional: int
    keywords: tuple[str, ...]


class Argument:
    """A value that is only equal to itself, and passes for a KV cache of 584-byte records."""

    shape = (4, 32, 584)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def folder(tree: Path) -> Path:
    return tree / "models" / "deepseek_v41"


def symbols(tree: Path) -> list[tuple[str, str]]:
    """The replaced symbols that a release defines."""
    return [
        (module, symbol)
        for module, file in FILES.items()
        for symbol in OPS
        if defines(folder(tree) / file, symbol)
    ]


def calls(tree: Path, module: str, symbol: str) -> list[Call]:
    """Every call of the symbol, by the callers that hold that module's object."""
    found = []
    for caller in CALLERS:
        file = folder(tree) / caller
        own = defines(file, symbol) if file.exists() else False
        if not file.exists() or own != (module == ROCM):
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == symbol:
                assert not any(isinstance(argument, ast.Starred) for argument in node.args)
                keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                found.append(Call(f"{caller}:{node.lineno}", len(node.args), keywords))
    return found


def arguments(call: Call, signature: inspect.Signature) -> tuple[list[Any], dict[str, Any]]:
    """Values for the call: text serving's for the two switches that choose a path, markers for the rest."""
    fixed = {"use_fnuz": False, "left_visible": None, "right_visible": None, "max_image_tokens": 0}
    names = list(signature.parameters)[: call.positional]
    positional = [fixed.get(name, Argument(name)) for name in names]
    return positional, {name: fixed.get(name, Argument(name)) for name in call.keywords}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tree(release, release_tree) -> Path:
    return release_tree(release)


@pytest.fixture
def modules(tree, vllm) -> dict[str, ModuleType]:
    """The release's modules with its real signatures, before their hooks have run."""
    sources: dict[str, str] = {}
    for module, symbol in symbols(tree):
        sources[module] = sources.get(module, "") + real_stub(folder(tree) / FILES[module], symbol)
    return {module: vllm.module(module, source) for module, source in sources.items()}


def test_where_the_symbols_are(tree, release):
    expected = [(CACHE_UTILS, GATHER), (CACHE_UTILS, COMBINE)]
    if release in ("0.30.0", "0.31.0"):
        expected.append((ROCM, COMBINE))
    assert symbols(tree) == expected


def test_signatures_are_kept(payload, modules):
    for name, module in modules.items():
        stock = {symbol: vars(module)[symbol] for symbol in OPS if symbol in vars(module)}
        payload.bind(name)
        for symbol, function in stock.items():
            assert str(inspect.signature(vars(module)[symbol])) == str(inspect.signature(function))


def test_real_calls_reach_the_op(payload, modules, ops, tree, release):
    seen = 0
    for name, module in modules.items():
        payload.bind(name)
        for symbol in OPS:
            for call in calls(tree, name, symbol) if symbol in vars(module) else []:
                check_call(vars(module)[symbol], getattr(ops, OPS[symbol]), call, name, release)
                seen += 1
    # two gathers and one combine in each caller; mega attention came with 0.31
    assert seen == (6 if release == "0.30.0" else 9)


def check_call(function, recorder, call: Call, module: str, release: str) -> None:
    signature = inspect.signature(function)
    positional, keywords = arguments(call, signature)
    sent = dict(signature.bind(*positional, **keywords).arguments)
    recorder.calls.clear()
    result = function(*positional, **keywords)
    (received,) = recorder.calls
    if function.__name__ == GATHER:
        assert result is None
        extra: dict[str, Any] = {"max_gather_len": None}
        sent.pop("use_fnuz", None)
    else:
        assert result == "result"
        extra = {"out": None, **CONTRACTS.get((module, release), COMMON)}
        sent = {key: value for key, value in sent.items() if key not in IMAGES}
    assert received == {**extra, **sent}, call.where


@pytest.mark.parametrize(
    "image",
    [{"left_visible": 1}, {"right_visible": 1}, {"max_image_tokens": 7}],
    ids=lambda image: next(iter(image)),
)
def test_image_calls_go_to_stock(payload, vllm, ops, release_tree, image):
    source = real_stub(folder(release_tree("0.30.0")) / FILES[CACHE_UTILS], COMBINE)
    module = vllm.module(CACHE_UTILS, source)
    payload.bind(CACHE_UTILS, skip=("gather",))
    function = vars(module)[COMBINE]
    names = list(inspect.signature(function).parameters)
    values = {name: Argument(name) for name in names[:10]}
    tag, received = function(**values, **image)
    assert tag == "stock"
    defaults = {"left_visible": None, "right_visible": None, "max_image_tokens": 0}
    assert received == {**values, **defaults, **image}
    assert ops.combine.calls == []


def mutations(parameters: str) -> dict[str, tuple[str, str]]:
    """Changed parameter lists, each with what the message must name."""
    names = [part.strip() for part in parameters.split(",")]
    first, last = names[0], names[-1]
    bare = last.split("=")[0]
    return {
        "removed": (", ".join(names[1:]), f"missing: {first}"),
        "renamed": (", ".join(["renamed", *names[1:]]), "added: renamed"),
        "added": (f"{parameters}, extra={{}}", "added: extra"),
        "added-first": (f"extra, {parameters}", "added: extra"),
        "default-changed": (", ".join([*names[:-1], f"{bare}=17"]), f"{bare} is"),
        "keyword-only": (", ".join([*names[:-1], "*", last]), f"{bare} is keyword-only"),
        "kwargs": (f"{parameters}, **kwargs", "added: kwargs"),
        "args": (", ".join([*names, "*args"]), "added: args"),
        "swapped": (", ".join([names[1], names[0], *names[2:]]), "order"),
    }


@pytest.mark.parametrize("kind", list(mutations("a, b, c")))
def test_changed_signatures_are_refused(payload, modules, kind):
    for name, module in modules.items():
        for symbol in [symbol for symbol in OPS if symbol in vars(module)]:
            stock = vars(module)[symbol]
            parameters, named = mutations(str(inspect.signature(stock))[1:-1])[kind]
            exec(f"def {symbol}({parameters}): ...", vars(module))
            with pytest.raises(payload.BindError) as raised:
                payload.bind(name)
            assert f"{name}.{symbol}" in str(raised.value)
            assert named in str(raised.value)
            assert not hasattr(vars(module)[symbol], "__deepinfer__")
            setattr(module, symbol, stock)


def test_0_32_may_lose_its_hint_only_as_0_31_had_it(payload, vllm, release_tree):
    """Removing the last parameter gives an older release's signature, which is known."""
    source = real_stub(folder(release_tree("0.33.0")) / FILES[CACHE_UTILS], GATHER)
    module = vllm.module(CACHE_UTILS, source.replace(", max_gather_len=None", ""))
    payload.bind(CACHE_UTILS, skip=("combine",))
    assert "max_gather_len" not in inspect.signature(vars(module)[GATHER]).parameters


def gather_values(**changed: Any) -> dict[str, Any]:
    names = list(inspect.signature(gather_contract).parameters)[:7]
    return {**{name: Argument(name) for name in names}, **changed}


@pytest.mark.parametrize("width", [288, 512, 528, 1024])
def test_other_records_are_refused_by_width(payload, modules, ops, width):
    payload.bind(CACHE_UTILS)
    with pytest.raises(ValueError, match=f"{width} bytes"):
        vars(modules[CACHE_UTILS])[GATHER](**gather_values(k_cache=SimpleNamespace(shape=(1, 32, width))))
    assert ops.gather.calls == []


def test_fnuz_is_refused(payload, modules, ops):
    payload.bind(CACHE_UTILS)
    with pytest.raises(ValueError, match="use_fnuz"):
        vars(modules[CACHE_UTILS])[GATHER](**gather_values(), use_fnuz=True)
    assert ops.gather.calls == []


@pytest.mark.kernels
def test_the_ops_have_the_parameters_that_the_adapters_use():
    pytest.importorskip("torch")
    from deepinfer_sm80.ops.combine import combine
    from deepinfer_sm80.ops.gather import gather

    for op, contract in ((gather, gather_contract), (combine, combine_contract)):
        found = inspect.signature(op).parameters
        known = inspect.signature(contract).parameters
        assert {name: (one.kind, one.default) for name, one in found.items()} == {
            name: (one.kind, one.default) for name, one in known.items()
        }
