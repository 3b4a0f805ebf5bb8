"""The TileLang sparse prefill kernel: which tensors it gets, how it is launched, what it compiles to, what it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.kernels

from deepinfer_sm80 import tile  # noqa: E402
from deepinfer_sm80.ops import sparse_prefill as op  # noqa: E402
from deepinfer_sm80.ops.sparse_prefill import tilelang as kernel  # noqa: E402
from deepinfer_sm80.ops.sparse_prefill import workloads  # noqa: E402

from deepinfer_cli.validate.compare import compare_outputs, tolerances_of  # noqa: E402
from tests.ops.compiled import Once, code_of  # noqa: E402

CASES = {case.name: case for case in workloads.cases("smoke")}
# what stays with the Triton kernel
UNALIGNED = ("odd-strides", "odd-kv-address", "odd-q-and-out-addresses")
# aligned, and still Triton's: the only case of its kernel for aligned rows on a GPU with TileLang
ALIGNED = "token-stride-2^31"
ARCHS = ("sm80", "sm86", "sm89")


@dataclass
class OnGpu:
    """What `serves` looks at of a tensor that is on a GPU."""

    strides: tuple[int, ...]
    address: int = 0x7F0000000000
    is_cuda: bool = True

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def data_ptr(self) -> int:
        return self.address


def tensors(**changes: OnGpu) -> tuple[Any, Any, Any]:
    found = {name: OnGpu((4096, 512, 1)) for name in ("q", "out")} | {"kv": OnGpu((512, 1))} | changes
    return found["q"], found["kv"], found["out"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_installed", lambda: True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"q": OnGpu((5000, 520, 1))}, True),
        ({"q": OnGpu((4096, 512, 1), is_cuda=False)}, False),
        ({"q": OnGpu((4097, 512, 1))}, False),
        ({"q": OnGpu((4096, 516, 1))}, False),
        ({"kv": OnGpu((515, 1))}, False),
        ({"kv": OnGpu((512, 1), 0x7F0000000002)}, False),
        ({"kv": OnGpu((2**31, 1))}, False),
        ({"out": OnGpu((4096, 513, 1))}, False),
        ({"out": OnGpu((4096, 512, 1), 0x7F0000000008)}, False),
    ],
)
def test_it_serves_rows_of_sixteen_byte_pieces_on_a_gpu(changes: dict[str, OnGpu], served: bool) -> None:
    assert kernel.serves(*tensors(**changes)) is served


def test_without_tilelang_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_installed", lambda: False)
    assert not kernel.serves(*tensors())
    assert op._launcher(*tensors()).__module__.endswith(".triton")


@pytest.mark.parametrize(
    ("heads", "ctas"), [(1, 1), (8, 1), (16, 1), (17, 1), (32, 1), (40, 3), (48, 3), (64, 2), (100, 7), (128, 4)]
)  # fmt: skip
def test_heads_are_cut_into_blocks_that_waste_few(heads: int, ctas: int) -> None:
    block = 16 if kernel.pick(heads) is kernel.HEADS_16 else 32
    assert -(-heads // block) == ctas
    assert ctas * block - heads < 16


class Recorder:
    """Stands for a compiled kernel and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def launched(monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any]) -> list[tuple[Any, ...]]:
    recorder = Recorder()
    monkeypatch.setattr(tile, "kernel", lambda variant: recorder)
    monkeypatch.setattr(op, "_launcher", lambda *tensors: kernel.launch)
    op.sparse_prefill(**inputs)
    return recorder.calls


@pytest.mark.usefixtures("installed")
def test_a_case_runs_tritons_kernel_for_aligned_rows_on_a_gpu_too() -> None:
    from deepinfer_sm80.ops.sparse_prefill import triton

    inputs = workloads.make_inputs(CASES[ALIGNED], "cpu")
    found = [inputs[name] for name in ("q", "kv", "out")]
    # where memory from a GPU's allocator starts
    assert triton.pick(*found) is triton.SMALL
    on_gpu = [OnGpu(one.stride()) for one in found]
    assert not kernel.serves(*on_gpu)
    assert kernel.serves(OnGpu((24 * 512, 512, 1)), *on_gpu[1:])


def test_dense_rows_become_one_list_with_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = workloads.make_inputs(CASES["dense-row-gap"], "cpu")
    ((q, kv, out, sink, indices, starts, scale, stride, width, ragged, has_sink),) = launched(
        monkeypatch, inputs
    )
    assert q is inputs["q"] and kv is inputs["kv"] and out is inputs["out"] and sink is inputs["sink"]
    assert (indices.shape, indices.data_ptr()) == ((2 * 45 + 40,), inputs["indices"].data_ptr())
    assert starts is inputs["lengths"]
    assert (scale, stride, width, ragged, has_sink) == (512**-0.5, 45, 40, 0, 1)


def test_ragged_rows_go_as_they_are_and_no_sink_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = workloads.make_inputs(CASES["no-sink"], "cpu")
    ((_q, _kv, _out, sink, indices, starts, *_numbers, ragged, has_sink),) = launched(monkeypatch, inputs)
    assert indices is inputs["indices"] and starts is inputs["indptr"]
    assert (ragged, has_sink) == (1, 0)
    assert sink.dtype == torch.float32


@pytest.mark.parametrize("name", ["no-tokens", "no-kv-rows"])
def test_nothing_is_launched_where_there_is_nothing_to_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = workloads.make_inputs(CASES[name], "cpu")
    assert launched(monkeypatch, inputs) == []
    assert not inputs["out"].any()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [16, 32])
def test_it_fits_two_ctas_on_an_sm(heads: int, arch: str, once: Once) -> None:
    pytest.importorskip("tilelang")
    from deepinfer_cli.validate import compile_gate

    variant = kernel.pick(heads)
    assert variant in kernel.variants(arch)
    code = code_of(once, variant, arch)
    build = compile_gate.build_of(code, arch)
    assert compile_gate.judge(build, code.ptx, arch, expects_mma=True) == ()
    assert build.mma
    assert build.spill_bytes == 0
    assert build.shared_bytes <= compile_gate.SMALL_SHARED_BYTES
    assert build.ctas_per_sm is not None and build.ctas_per_sm >= 2


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> dict[str, Any]:
    """The op with its TileLang kernel, on the CPU; the kernels by name."""
    pytest.importorskip("tilelang")
    from tests.emulator.kernel import Kernel

    kernels: dict[str, Any] = {}

    def find(variant: Any) -> Any:
        if variant.name not in kernels:
            kernels[variant.name] = Kernel(variant, libraries)
        return kernels[variant.name]

    monkeypatch.setattr(tile, "kernel", find)
    monkeypatch.setattr(op, "_launcher", lambda *tensors: kernel.launch)
    return kernels


def test_every_smoke_case_is_right_without_a_bank_conflict(emulated: dict[str, Any]) -> None:
    for name, case in CASES.items():
        if name in UNALIGNED:
            continue
        inputs = workloads.make_inputs(case, "cpu")
        want = workloads.expected(case, inputs)
        verdict = compare_outputs(workloads.run(inputs), want, tolerances_of(workloads, case))
        assert verdict.ok, f"{case.id}: {verdict.reason}"
        assert all(found.counts.conflicts == 0 for found in emulated.values()), case.id
    assert len(emulated) == 2


def test_a_missing_barrier_is_seen(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the emulator proves nothing: each barrier of the loop, left out, must give wrong results."""
    pytest.importorskip("tilelang")
    from tests.emulator.kernel import Kernel

    case = CASES["128-heads"]
    monkeypatch.setattr(op, "_launcher", lambda *tensors: kernel.launch)
    for barrier in range(2):

        def leave_out(source: str, barrier: int = barrier) -> str:
            at = [found.start() for found in re.finditer(r"__syncthreads\(\);", source)][barrier]
            return source[:at] + source[at:].replace("__syncthreads();", "", 1)

        broken = Kernel(kernel.HEADS_32, libraries, leave_out)
        monkeypatch.setattr(tile, "kernel", lambda variant, broken=broken: broken)
        inputs = workloads.make_inputs(case, "cpu")
        want = workloads.expected(case, inputs)
        assert not compare_outputs(workloads.run(inputs), want, tolerances_of(workloads, case)).ok
