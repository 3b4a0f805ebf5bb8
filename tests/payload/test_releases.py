"""Every adapter against the signatures and call expressions of the four real releases."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import (
    BUILD,
    CACHE_UTILS,
    COMBINE,
    CONTRACTS,
    DECODE,
    GATHER,
    MHC,
    PREFILL,
    ROCM,
    SPARSE,
    WARMUP,
    Argument,
    defines,
    gather_contract,
    parsed,
    real_stub,
)

PRE = "mhc_pre_delayed_tilelang"
FUSED = "mhc_fused_post_pre_delayed_tilelang"
POST = "mhc_post_tilelang"
COMPILE = "MHCPreNormKernel.compile_many"
# module → the symbols replaced there, with their ops
REPLACED = {
    CACHE_UTILS: {GATHER: "gather", COMBINE: "combine"},
    ROCM: {COMBINE: "combine"},
    SPARSE: {BUILD: "ragged", PREFILL: "sparse_prefill", DECODE: "sparse_decode"},
    MHC: {PRE: "mhc_pre_delayed", FUSED: "mhc_fused_post_pre_delayed", POST: "mhc_post"},
    WARMUP: {COMPILE: "mhc_pre_delayed"},
}
# the callers that hold `cache_utils`' or `rocm`'s functions; V4's have copies of their own
V41_CALLERS = tuple(
    f"models/deepseek_v41/{name}"
    for name in ("amd/rocm.py", "nvidia/flashmla.py", "nvidia/flash_mla_mega_attn.py")
)
# 0.31 and later: the decoder layer gives the function another name before it calls it
ALIASES = {"mhc_pre": PRE}
# what each place of definition promises, by release (the op's own docstring says what the flags mean)
PROMISES = {
    (CACHE_UTILS, "0.30.0"): {"replay_clamp": False, "width_cap": False},
    (ROCM, "0.30.0"): {"replay_clamp": False, "width_cap": True},
    (ROCM, "0.31.0"): {"replay_clamp": False, "width_cap": True},
}
COMMON = {"replay_clamp": True, "width_cap": False}
IMAGES = ("left_visible", "right_visible", "max_image_tokens")
OLD = ("0.30.0", "0.31.0")
# calls of each symbol in a release, over all its callers
SEEN = {
    "0.30.0": {GATHER: 4, COMBINE: 2, BUILD: 7, PREFILL: 3, DECODE: 2, PRE: 3, FUSED: 1, POST: 7},
    "0.31.0": {GATHER: 6, COMBINE: 3, BUILD: 7, PREFILL: 3, DECODE: 2, PRE: 3, FUSED: 1, POST: 8},
    "0.32.0": {GATHER: 6, COMBINE: 3, BUILD: 10, PREFILL: 3, DECODE: 2, PRE: 3, FUSED: 1, POST: 8},
    "0.33.0": {GATHER: 6, COMBINE: 3, BUILD: 10, PREFILL: 3, DECODE: 2, PRE: 4, FUSED: 1, POST: 9},
}
HEAD = {"head_dim": 512, "nope_head_dim": 448, "rope_head_dim": 64}
FIXED = {
    "use_fnuz": False,
    "left_visible": None,
    "right_visible": None,
    "max_image_tokens": 0,
    "output_mxfp8": None,
}
pytestmark = pytest.mark.release


@dataclass(frozen=True)
class Call:
    """One call expression of a release: how it passes its arguments, and where."""

    where: str
    positional: int
    keywords: tuple[str, ...]


def path_of(module: str) -> str:
    return module.removeprefix("vllm.").replace(".", "/") + ".py"


def symbols(tree: Path) -> list[tuple[str, str]]:
    """The replaced symbols that a release defines."""
    return [
        (module, symbol)
        for module, names in REPLACED.items()
        for symbol in names
        if defines(tree / path_of(module), symbol)
    ]


def callers(tree: Path, module: str) -> Iterator[Path]:
    """The files whose calls by name are calls of that module's object."""
    if module not in (CACHE_UTILS, ROCM):
        folders = ("models/deepseek_v4", "models/deepseek_v41", "v1/attention", "model_executor/kernels/mhc")
        yield from (file for folder in folders for file in sorted((tree / folder).rglob("*.py")))
        return
    for name in V41_CALLERS:
        file = tree / name
        if file.exists() and (module == CACHE_UTILS or defines(file, COMBINE)):
            yield file


def calls(tree: Path, module: str, symbol: str) -> list[Call]:
    """Every call of the symbol, by the callers that hold that module's object."""
    found = []
    for file in callers(tree, module):
        text = file.read_text(encoding="utf-8")
        if symbol not in text or (symbol == COMBINE and defines(file, symbol) != (module == ROCM)):
            continue
        # stock's kernel in tilelang_kernels.py has the name of the function that launches it
        if file.name == "tilelang_kernels.py":
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if ALIASES.get(node.func.id, node.func.id) != symbol:
                    continue
                assert not any(isinstance(argument, ast.Starred) for argument in node.args)
                keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                where = f"{file.relative_to(tree).as_posix()}:{node.lineno}"
                found.append(Call(where, len(node.args), keywords))
    return found


def arguments(
    call: Call, signature: inspect.Signature, **fixed: Any
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Values for the call, and what they are bound to: `fixed` for the switches, markers for the rest."""
    fixed = {**FIXED, **HEAD, **fixed}
    names = list(signature.parameters)[: call.positional]
    values = {name: fixed.get(name, Argument(name)) for name in (*names, *call.keywords)}
    positional, keywords = [values[name] for name in names], {name: values[name] for name in call.keywords}
    return positional, keywords, dict(signature.bind(*positional, **keywords).arguments)


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
        sources[module] = sources.get(module, "") + real_stub(tree / path_of(module), symbol)
    return {module: vllm.module(module, source) for module, source in sources.items()}


def held(module: ModuleType, symbol: str) -> Any:
    value: Any = module
    for part in symbol.split("."):
        value = getattr(value, part)
    return value


def test_where_the_symbols_are(tree, release):
    expected = [(module, symbol) for module, names in REPLACED.items() for symbol in names]
    if release not in OLD:
        expected.remove((ROCM, COMBINE))
    assert symbols(tree) == expected


def test_signatures_are_kept(payload, modules):
    for name, module in modules.items():
        stock = {symbol: held(module, symbol) for symbol in REPLACED[name]}
        payload.bind(name)
        for symbol, function in stock.items():
            assert held(module, symbol) is not function
            assert str(inspect.signature(held(module, symbol))) == str(inspect.signature(function))


def test_real_calls_reach_the_op(payload, modules, ops, no_torch, tree, release):
    seen = dict.fromkeys(SEEN[release], 0)
    for name, module in modules.items():
        payload.bind(name)
        for symbol, op in REPLACED[name].items():
            for call in calls(tree, name, symbol):
                CHECKS[symbol](held(module, symbol), getattr(ops, op), call, name, release)
                seen[symbol] += 1
    assert seen == SEEN[release]
    # whichever op is called first, all are compiled
    assert set(ops.first) == {5120, "gather", "combine", "ragged", "sparse_prefill", "sparse_decode"}


def sent_and_received(
    function, recorder, call: Call, **fixed: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Makes the call: what it sent, what reached the op, and what came back."""
    positional, keywords, sent = arguments(call, inspect.signature(function), **fixed)
    recorder.calls.clear()
    result = function(*positional, **keywords)
    (received,) = recorder.calls
    return sent, received, result


def check_gather(function, recorder, call: Call, module: str, release: str) -> None:
    sent, received, result = sent_and_received(function, recorder, call)
    assert result is None
    sent.pop("use_fnuz", None)
    assert received == {"max_gather_len": None, **sent}, call.where


def check_combine(function, recorder, call: Call, module: str, release: str) -> None:
    sent, received, result = sent_and_received(function, recorder, call)
    assert result == "result"
    sent = {key: value for key, value in sent.items() if key not in IMAGES}
    assert received == {"out": None, **PROMISES.get((module, release), COMMON), **sent}, call.where


def check_build(function, recorder, call: Call, module: str, release: str) -> None:
    sent, received, result = sent_and_received(function, recorder, call)
    assert result == "result"
    assert received == {"num_rows": -1, **sent, "compact": release not in OLD}, call.where


def check_prefill(function, recorder, call: Call, module: str, release: str) -> None:
    if "backends/mla" in call.where:
        # rows of another model: stock gets the call as it came
        positional, keywords, sent = arguments(
            call,
            inspect.signature(function),
            q=Argument("q", shape=(6, 16, 576)),
            head_dim=576,
            nope_head_dim=512,
        )
        recorder.calls.clear()
        tag, received = function(*positional, **keywords)
        assert (tag, recorder.calls) == ("stock", []), call.where
        assert received == sent, call.where
        return
    sent, received, result = sent_and_received(function, recorder, call)
    assert result is None
    assert received == {
        "q": sent["q"],
        "kv": sent["kv"],
        "out": sent["output"],
        "scale": sent["scale"],
        "sink": sent["attn_sink"],
        "indices": sent["indices"],
        "lengths": sent["topk_length"],
        "indptr": None,
    }, call.where


def check_decode(function, recorder, call: Call, module: str, release: str) -> None:
    for swa_only in (False, True):
        sent, received, result = sent_and_received(function, recorder, call, swa_only=swa_only)
        rotates = release != "0.30.0"
        assert result == (6 if rotates else None), call.where
        assert received == {
            "q": sent["q"],
            "out": sent["output"],
            "swa_cache": sent["swa_k_cache"],
            "swa_indices": sent["swa_ragged_indices"],
            "swa_indptr": sent["swa_ragged_indptr"],
            "scale": sent["scale"],
            "sink": sent["attn_sink"],
            "extra_cache": None if swa_only else sent["kv_cache"],
            "extra_indices": None if swa_only else sent["topk_ragged_indices"],
            "extra_indptr": None if swa_only else sent["topk_ragged_indptr"],
            "positions": sent.get("inv_rope_positions"),
            "cos_sin_cache": sent.get("inv_rope_cos_sin_cache"),
        }, call.where
        assert (received["positions"] is not None) is rotates, call.where


def check_mhc(function, recorder, call: Call, module: str, release: str) -> None:
    sent, received, result = sent_and_received(function, recorder, call)
    assert result == "result"
    defaults = {
        name: one.default
        for name, one in inspect.signature(function).parameters.items()
        if one.default is not one.empty
    }
    if "mixing" in received:
        mixing = received.pop("mixing")
        received |= {stock: getattr(mixing, ours) for stock, ours in MIXING.items()}
    assert received == {**defaults, **sent}, call.where


# stock's names of the numbers that our ops take together
MIXING = {
    "rms_eps": "rms_eps",
    "hc_pre_eps": "pre_eps",
    "hc_sinkhorn_eps": "sinkhorn_eps",
    "hc_post_mult_value": "post_factor",
    "sinkhorn_repeat": "iterations",
}
CHECKS = {
    GATHER: check_gather,
    COMBINE: check_combine,
    BUILD: check_build,
    PREFILL: check_prefill,
    DECODE: check_decode,
    PRE: check_mhc,
    FUSED: check_mhc,
    POST: check_mhc,
}


@pytest.mark.parametrize(
    "image",
    [{"left_visible": 1}, {"right_visible": 1}, {"max_image_tokens": 7}],
    ids=lambda image: next(iter(image)),
)
def test_image_calls_go_to_stock(payload, vllm, ops, release_tree, image):
    source = real_stub(release_tree("0.30.0") / path_of(CACHE_UTILS), COMBINE)
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
        for symbol in REPLACED[name]:
            path, _, last = symbol.rpartition(".")
            owner = held(module, path) if path else module
            stock = held(module, symbol)
            parameters, named = mutations(str(inspect.signature(stock))[1:-1])[kind]
            scope = {"__name__": module.__name__}
            exec(f"def {last}({parameters}): ...", scope)
            setattr(owner, last, scope[last])
            with pytest.raises(payload.BindError) as raised:
                payload.bind(name)
            assert f"{name}.{symbol}" in str(raised.value)
            assert named in str(raised.value)
            assert not hasattr(held(module, symbol), "__deepinfer__")
            setattr(owner, last, stock)


def test_0_32_may_lose_its_hint_only_as_0_31_had_it(payload, vllm, release_tree):
    """Removing the last parameter gives an older release's signature, which is known."""
    source = real_stub(release_tree("0.33.0") / path_of(CACHE_UTILS), GATHER)
    module = vllm.module(CACHE_UTILS, source.replace(", max_gather_len=None", ""))
    payload.bind(CACHE_UTILS, skip=("combine",))
    assert "max_gather_len" not in inspect.signature(vars(module)[GATHER]).parameters


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("pass", "names none of"),
        ("_pack_dense_prefix_to_ragged_kernel; _count_valid_row_entries_kernel", "both of"),
    ],
)
def test_a_ragged_build_of_an_unknown_contract_is_refused(payload, modules, body, named):
    """Its signature is the same in all releases: what it does is told by the kernels that it names."""
    module = modules[SPARSE]
    exec(f"def {BUILD}(indices, lengths, num_rows=-1):\n    {body}\n", vars(module))
    with pytest.raises(payload.BindError, match=named):
        payload.bind(SPARSE)
    assert not any(hasattr(vars(module)[symbol], "__deepinfer__") for symbol in REPLACED[SPARSE])
    payload.bind(SPARSE, skip=("ragged",))
    assert hasattr(vars(module)[DECODE], "__deepinfer__")


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
@pytest.mark.parametrize("op", list(CONTRACTS))
def test_the_ops_have_the_parameters_that_the_adapters_use(op):
    pytest.importorskip("torch")
    name, contract = CONTRACTS[op]
    function = getattr(importlib.import_module(f"deepinfer_sm80.ops.{op}"), name)
    found = inspect.signature(function).parameters
    known = inspect.signature(contract).parameters
    assert [found[key] for key in known] == [
        one.replace(annotation=found[key].annotation) for key, one in known.items()
    ]
    # what a benchmark or a test passes beside them
    assert all(found[key].kind is inspect.Parameter.KEYWORD_ONLY for key in found.keys() - known.keys())
    assert all(found[key].default is None for key in found.keys() - known.keys())
