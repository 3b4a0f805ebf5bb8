"""A launch is what the compile gate compiled: same arguments, types, constants and options, from the table alone."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.catalog import ARCHS
from tests.ops.catalog import INTERPRETED as OPS

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
# argument types as Triton spells them, by what a launch passes
TYPES = {
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((grid, args, options))


def launched(monkeypatch: pytest.MonkeyPatch, op: str, **inputs: Any) -> tuple[Any, Any, Any]:
    """Grid, arguments and options of the one launch that a call of the op makes."""
    recorder = Recorder()
    monkeypatch.setattr(f"deepinfer_sm80.ops.{op}.triton._{op}_kernel", recorder)
    getattr(importlib.import_module(f"deepinfer_sm80.ops.{op}"), op)(**inputs)
    (launch,) = recorder.launches
    return launch


def case_inputs(op: str, name: str, **params: Any) -> dict[str, Any]:
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    case = next(case for case in workloads.cases("full") if case.name == name)
    inputs: dict[str, Any] = workloads.make_inputs(replace(case, params={**case.params, **params}), "cpu")
    return inputs


@pytest.mark.parametrize("op", OPS)
def test_triton_specialises_nothing_that_the_gate_does_not_say(op: str) -> None:
    """Else Triton compiles other code for a stride of 1 or an aligned pointer than the gate has seen."""
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    for variant in module.variants("sm80"):
        for param in variant.kernel.params:
            kind = variant.signature.get(param.name)
            assert (kind is None) is param.is_constexpr, param.name
            if kind is None or param.name in variant.aligned:
                continue
            if kind.startswith("*"):
                assert param.do_not_specialize_on_alignment, param.name
            elif kind == "fp32":
                # a Python float is one without being told
                assert param.do_not_specialize and param.annotation_type in ("", kind), param.name
            else:
                assert param.do_not_specialize and param.annotation_type == kind, param.name


def kernels_of(module: Any) -> dict[str, Any]:
    """Name in the op's `triton` module → kernel, for every kernel of the table."""
    wanted = {id(variant.kernel) for arch in ARCHS for variant in module.variants(arch)}
    return {name: value for name, value in vars(module).items() if id(value) in wanted}


@functools.lru_cache(maxsize=1)
def inputs_of(op: str) -> list[tuple[str, dict[str, Any]]]:
    """Id and inputs of the smoke and bench cases; what is timed is large, and nothing is read or written here."""
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    smoke = [(case.id, workloads.make_inputs(case, "cpu")) for case in workloads.cases("smoke")]
    return smoke + [(case.id, workloads.make_inputs(case, "meta")) for case in workloads.bench_cases()]


def launches(
    op: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Variant, arguments by name, and the case, of each launch that the cases make."""
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    kernels = kernels_of(module)
    recorders = {name: Recorder() for name in kernels}
    for name, recorder in recorders.items():
        monkeypatch.setattr(module, name, recorder)
    for case, inputs in inputs_of(op):
        workloads.run(inputs)
        for name, recorder in recorders.items():
            for _grid, args, options in recorder.launches:
                variant = next(
                    one
                    for one in module.variants(arch)
                    if one.kernel is kernels[name]
                    and options
                    == {**one.constexprs, "num_warps": one.num_warps, "num_stages": one.num_stages}
                )
                names = inspect.signature(kernels[name].fn).parameters
                yield variant, dict(zip(names, args, strict=False)), case
            recorder.launches.clear()


# neighbours share their inputs
@pytest.mark.parametrize(("op", "arch"), [(op, arch) for op in OPS for arch in ("sm80", "sm86")])
def test_every_launch_is_a_variant_of_the_table(op: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_sm80 import gate

    from deepinfer_cli.validate import artifact, compile_gate

    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", arch)
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    left = {variant.name for variant in module.variants(arch)}
    small = {}
    for limit in (None, compile_gate.SMALL_SHARED_BYTES):
        with gate.assume(smem_limit=limit), monkeypatch.context() as patch:
            for variant, values, case in launches(op, arch, patch):
                left.discard(variant.name)
                small |= {variant.name: variant} if limit else {}
                check_arguments(variant, values, case)
    assert not left, "no case reaches these"
    sizes = {name: artifact.make(variant, arch).shared_bytes for name, variant in small.items()}
    too_large = {name: size for name, size in sizes.items() if size > compile_gate.SMALL_SHARED_BYTES}
    assert too_large == {}, "launched although shared memory was limited"


def check_arguments(variant: Any, values: dict[str, Any], case: str) -> None:
    """The types that the compile gate compiled for."""
    assert list(values) == list(variant.signature), case
    for name, value in values.items():
        wanted = variant.signature[name]
        if isinstance(value, torch.Tensor):
            assert TYPES[value.dtype] == wanted, (case, name)
        else:
            assert type(value) is (float if wanted == "fp32" else int), (case, name)
            assert not wanted.startswith("*"), (case, name)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("odd-length", "wide"),
        ("odd-page-stride", "narrow"),
        ("odd-cache-address", "narrow"),
        ("odd-row-stride", "narrow"),
        ("odd-out-address", "narrow"),
        ("requests-apart", "wide"),
    ],
)
def test_gather_takes_the_wide_variant_only_where_its_alignment_holds(name: str, variant: str) -> None:
    from deepinfer_sm80.ops.gather import triton as kernel

    inputs = case_inputs("gather", name)
    assert kernel.pick(inputs["out"], inputs["k_cache"]).name == variant


def test_gather_looks_at_the_stride_between_requests_too() -> None:
    from deepinfer_sm80.ops.gather import triton as kernel

    inputs = case_inputs("gather", "requests-apart", request_stride=50 * 512 + 1)
    assert kernel.pick(inputs["out"], inputs["k_cache"]).name == "narrow"


@pytest.mark.parametrize(
    "unaligned", ["nothing", "indices", "topk", "row", "topk row", "width", "topk width", "topk count"]
)
def test_combine_takes_the_wide_variant_only_where_its_alignment_holds(unaligned: str) -> None:
    from deepinfer_sm80.ops.combine import triton as kernel

    def rows(width: int, stride: int, shift: int) -> Any:
        memory = torch.zeros(4 * stride + shift, dtype=torch.int32)
        # torch allocates at multiples of 64 bytes
        return torch.as_strided(memory, (4, width), (stride, 1), shift)

    indices = rows(
        125 if unaligned == "width" else 128, 130 if unaligned == "row" else 132, int(unaligned == "indices")
    )
    topk = rows(
        22 if unaligned == "topk width" else 64,
        66 if unaligned == "topk row" else 68,
        int(unaligned == "topk"),
    )
    count = 63 if unaligned == "topk count" else 64
    align = kernel.pick(indices, topk, count).constexprs["ALIGN"]
    assert align == (4 if unaligned == "nothing" else 1)


def test_the_hint_sizes_the_grid_and_the_card_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_sm80 import gate

    inputs = case_inputs("gather", "no-hint")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")

    def grid(**changes: Any) -> int:
        return int(launched(monkeypatch, "gather", **{**inputs, **changes})[0][0])

    with gate.assume(sm_count=108):
        # two requests: pages of 64 are four tiles, and one page more may be touched
        assert grid(max_gather_len=70) == 2 * 3 * 4
        assert grid(max_gather_len=None) == 2 * (15 + 1) * 4
        assert grid(max_gather_len=0) == 2 * 4
    with gate.assume(sm_count=1):
        assert grid(max_gather_len=None) == 32


def test_every_parameter_of_a_gather_case_is_used() -> None:
    """A parameter that nobody reads is a case that does not test what its name says."""
    from deepinfer_sm80.ops.gather import workloads

    class Read(dict):  # type: ignore[type-arg]
        def __init__(self, values: Any) -> None:
            super().__init__(values)
            self.read: set[str] = set()

        def __getitem__(self, key: str) -> Any:
            self.read.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.read.add(key)
            return super().get(key, default)

    for case in workloads.cases("full"):
        tokens = case.params["tokens"]
        if (tokens if isinstance(tokens, int) else sum(tokens)) > 20_000:
            continue
        params = Read(case.params)
        # memory that is never touched: some of these are gigabytes
        workloads.make_inputs(replace(case, params=params), "meta")
        assert params.read >= set(case.params), case.id
