"""How sparse decode is launched: which variant, how many splits, and with what arguments."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

from deepinfer_sm80 import gate  # noqa: E402
from deepinfer_sm80.ops.sparse_decode import choice, workloads  # noqa: E402
from deepinfer_sm80.ops.sparse_decode import triton as kernel  # noqa: E402

CASES = {case.name: case for case in workloads.cases("full")}
WIDTHS = (128, 512)
TYPES = {torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
TYPES |= {torch.float32: "*fp32"}
NUMBERS = {int: ("i32", "i64"), float: ("fp32",)}


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((grid, args, options))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    found = {"attend_kernel": Recorder(), "merge_kernel": Recorder()}
    for name, recorder in found.items():
        monkeypatch.setattr(kernel, name, recorder)
    return found


def picked(tokens: int, heads: int, *, sm_count: int = 108, smem_limit: int = 166_912, **changes: Any) -> Any:
    arguments = {"widths": WIDTHS, "aligned": True, **changes}
    with pytest.MonkeyPatch.context() as patch, gate.assume(sm_count=sm_count, smem_limit=smem_limit):
        patch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
        return choice.pick(tokens, heads, **arguments)


def test_triton_specialises_nothing_that_the_gate_does_not_say() -> None:
    for variant in kernel.variants("sm80"):
        for param in variant.kernel.params:
            kind = variant.signature.get(param.name)
            assert (kind is None) is param.is_constexpr, param.name
            if kind is None:
                continue
            if kind.startswith("*"):
                assert param.do_not_specialize_on_alignment, param.name
            else:
                assert param.do_not_specialize and param.annotation_type == kind, param.name


@pytest.mark.parametrize("sm_count", [72, 108])
def test_every_launch_is_a_variant_of_the_table(recorders: dict[str, Recorder], sm_count: int) -> None:
    variants = {key(v.kernel.fn.__name__, options(v)): v for v in kernel.variants("sm80")}
    for case in (*workloads.cases("smoke"), *workloads.bench_cases()):
        inputs = workloads.make_inputs(case, "cpu" if case.suite == "smoke" else "meta")
        with gate.assume(sm_count=sm_count):
            workloads.run(inputs)
    for name, recorder in recorders.items():
        assert recorder.launches
        for _grid, args, given in recorder.launches:
            variant = variants[key(name, given)]
            assert len(args) == len(variant.signature)
            for (argument, kind), value in zip(variant.signature.items(), args, strict=True):
                if isinstance(value, torch.Tensor):
                    # where there is nothing to read, the scratch is pointed at
                    stand_in = argument in ("sink_ptr", "positions_ptr", "cos_sin_ptr")
                    assert kind == TYPES[value.dtype] or stand_in, argument
                else:
                    assert kind in NUMBERS[type(value)], argument
    used = {args["BLOCK_K"] for _grid, _args, args in recorders["attend_kernel"].launches}
    assert used == {16, 32, 64}


def key(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    return (name, *sorted(given.items()))


def options(variant: Any) -> dict[str, Any]:
    return {**variant.constexprs, "num_warps": variant.num_warps, "num_stages": variant.num_stages}


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89"])
def test_every_variant_fits_every_card_and_two_fit_48_kib(arch: str) -> None:
    sizes = {v.name: choice.SHARED_BYTES.get(v.name, 0) for v in kernel.variants(arch)}
    assert list(sizes) == ["16x16-any", "16x32", "32x64", "merge"]
    assert max(sizes.values()) <= gate.SMEM_LIMITS[arch]
    assert sizes["16x16-any"] <= 49_152 and sizes["16x32"] <= 49_152


@pytest.mark.parametrize("variant", [choice.ANY, choice.SMALL, choice.LARGE], ids=lambda one: one.name)
def test_shared_memory_is_what_the_table_says(variant: Any) -> None:
    from deepinfer_cli.validate import artifact

    assert artifact.make(variant, "sm80").shared_bytes <= choice.SHARED_BYTES[variant.name]


def test_the_large_variant_takes_over_where_it_was_faster() -> None:
    names = {(t, h): picked(t, h, sm_count=132)[0].name for t in (1, 6, 24, 96) for h in (64, 32, 16, 8)}
    large = {key for key, name in names.items() if name == "32x64"}
    assert large == {(24, 64), (24, 32), (96, 64), (96, 32)}
    assert set(names.values()) == {"16x32", "32x64"}


def test_48_kib_and_odd_addresses_have_their_own() -> None:
    assert picked(96, 64, smem_limit=49_152)[0] is choice.SMALL
    assert picked(96, 64, smem_limit=101_376)[0] is choice.LARGE
    assert picked(96, 64, aligned=False)[0] is choice.ANY


@pytest.mark.parametrize(
    ("tokens", "heads", "splits"), [(1, 64, 20), (6, 64, 10), (6, 32, 10), (24, 64, 5), (24, 32, 5), (96, 64, 2), (96, 32, 1)]
)  # fmt: skip
def test_splits_are_those_that_were_fastest(tokens: int, heads: int, splits: int) -> None:
    assert picked(tokens, heads, sm_count=132)[1] == splits


def test_splits_stay_within_the_tiles_and_the_scratch() -> None:
    for variant in (choice.ANY, choice.SMALL, choice.LARGE):
        for tokens in (1, 2, 3, 7, 50, 200):
            for widths in ((0,), (1,), (128,), (128, 512), (5, 100_000)):
                for sm_count in (1, 72, 84, 108, 128, 132):
                    splits = choice.choose_splits(variant, tokens, 64, widths, sm_count)
                    tiles = sum(-(-width // variant.constexprs["BLOCK_K"]) for width in widths)
                    assert 1 <= splits <= max(1, min(tiles, choice.MAX_SPLITS))


def test_one_split_needs_neither_merge_nor_scratch(recorders: dict[str, Recorder]) -> None:
    inputs = workloads.make_inputs(CASES["usual"], "cpu")
    with gate.assume(sm_count=1):
        workloads.run(inputs)
    ((grid, args, _options),) = recorders["attend_kernel"].launches
    assert grid[1] == 1 and args[2].numel() == 0
    assert not recorders["merge_kernel"].launches


def test_splits_share_one_allocation(recorders: dict[str, Recorder]) -> None:
    inputs = workloads.make_inputs(CASES["usual"], "cpu")
    workloads.run(inputs)
    ((grid, args, _options),) = recorders["attend_kernel"].launches
    ((_grid, merge_args, _options),) = recorders["merge_kernel"].launches
    splits, (tokens, heads) = grid[1], inputs["q"].shape[:2]
    part, stats = args[2:4]
    assert splits > 1 and part.numel() == splits * tokens * heads * 514
    assert stats.data_ptr() == part.data_ptr() + 4 * splits * tokens * heads * 512
    assert merge_args[1] is part and merge_args[2] is stats


@pytest.mark.parametrize(
    "name", ["odd-page-strides", "odd-cache-address", "odd-strides", "odd-addresses", "padded-rows", "usual"]
)
def test_alignment_is_looked_at_in_every_address_and_stride(
    recorders: dict[str, Recorder], name: str
) -> None:
    workloads.run(workloads.make_inputs(CASES[name], "cpu"))
    ((_grid, _args, given),) = recorders["attend_kernel"].launches
    assert given["ALIGN"] == (1 if name.startswith("odd") else 16)


def test_inverse_divides_every_slot() -> None:
    largest = 2**31 - 1
    for size in (*range(1, 300), 1000, 4096, 65_537, 2**20 - 1, 2**24):
        factor, shift = kernel.inverse(size)
        assert factor * largest < 2**63
        edges = {0, 1, largest, largest // size * size, largest // size * size - 1}
        for step in (1, 2, 1000, 123_457):
            edges |= {step * size - 1, step * size, step * size + 1}
        for slot in edges:
            if 0 <= slot <= largest:
                assert slot * factor >> shift == slot // size, (size, slot)
