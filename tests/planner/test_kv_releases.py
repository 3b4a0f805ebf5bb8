"""The grouping and the reserve, as the code of each release computes them: its own functions on stand-ins for its classes."""

from __future__ import annotations

import ast
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_cli.planner import kv
from deepinfer_cli.planner.shape import FLASH, Shape

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


@dataclass(frozen=True)
class Spec:
    """A page of ours as vLLM's functions see a specification."""

    page: kv.Page

    @property
    def page_size_bytes(self) -> int:
        return self.page.bytes


class Compressed(Spec):
    pass


class Window(Spec):
    pass


class Ring(Spec):
    pass


KINDS = {"compressed": Compressed, "window": Window, "ring": Ring}


class Uniform:
    """`UniformTypeKVCacheSpecs`: one kind of page."""

    def __init__(self, specs: dict[str, Spec]) -> None:
        self.kv_cache_specs = specs
        self.first_spec = next(iter(specs.values()))

    @classmethod
    def is_uniform_type(cls, specs: dict[str, Spec]) -> bool:
        return len({type(spec) for spec in specs.values()}) == 1

    @classmethod
    def from_specs(cls, specs: dict[str, Spec]) -> Uniform:
        return cls(specs)

    def get_max_layers_per_page_size(self) -> int:
        return Counter(spec.page_size_bytes for spec in self.kv_cache_specs.values()).most_common(1)[0][1]


def functions(path: Path, names: set[str], **more: Any) -> dict[str, Any]:
    """Functions (also of classes) of a source file, compiled without their annotations' imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {
        "cdiv": lambda a, b: -(-a // b),
        "math": math,
        "defaultdict": defaultdict,
        **more,
    }
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *found], [])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), scope)
    return scope


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, pristine_release: Any) -> Path:
    return Path(pristine_release(request.param)) / "vllm"


def grouped(root: Path, shape: Shape, traffic: kv.Traffic) -> list[list[kv.Page]]:
    planning = root / "v1/core/kv_cache_planning.py"
    planning = planning if planning.exists() else root / "v1/core/kv_cache_utils.py"
    scope = functions(
        planning,
        {"_get_packed_kv_cache_groups", "_approximate_gcd"},
        UniformTypeKVCacheSpecs=Uniform,
        KVCacheGroupSpec=lambda names, spec: [one.page for one in spec.kv_cache_specs.values()],
        MambaSpec=type("MambaSpec", (), {}),
        CircularBufferSpec=Ring,
        KpoolTailSpec=Ring,
        SlidingWindowSpec=Window,
        _annotate_eagle_groups=lambda *a, **k: None,
        _warn_if_unannotated_eagle_mamba=lambda *a, **k: None,
        _is_deepseek_v4_eagle=lambda config: False,
        _uses_trailing_mtp_layers=lambda config: False,
    )
    pages = kv.pages(shape, traffic.block_size, traffic.speculative_tokens)
    specs = {f"{page.layer}.{page.what}": KINDS[page.kind](page) for page in pages}
    layout = SimpleNamespace(is_block_outermost=True)
    config = SimpleNamespace(cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout))
    found: list[list[kv.Page]] = scope["_get_packed_kv_cache_groups"](config, specs)
    return found


def some_shapes() -> list[tuple[Shape, kv.Traffic]]:
    source = random.Random(41)
    found = [
        (FLASH, kv.Traffic(8_192, block_size=size, speculative_tokens=k))
        for size in (64, 128)
        for k in (0, 5, 9)
    ]
    for _ in range(60):
        layers = source.randrange(6, 48)
        sources = tuple(sorted(source.sample(range(2, layers), source.randrange(1, min(7, layers - 2)))))
        turn = source.choice(sources)
        ratios = tuple(0 if layer < sources[0] else 2 if layer < turn else 1 for layer in range(layers))
        shape = Shape(ratios, sources, sources, 8, draft_layers=source.randrange(4))
        found.append(
            (
                shape,
                kv.Traffic(
                    8_192, block_size=source.choice((64, 128, 256)), speculative_tokens=source.choice((0, 5))
                ),
            )
        )
    return found


@pytest.mark.release
def test_groups_are_those_of_the_release(release: Path) -> None:
    for shape, traffic in some_shapes():
        ours = [list(group.pages) for group in kv.groups(shape, traffic)]
        assert ours == grouped(release, shape, traffic), (shape.ratios, shape.kv_sources, traffic)


@pytest.mark.release
def test_the_reserve_of_a_window_is_that_of_the_release(release: Path) -> None:
    text = (release / "v1/kv_cache_interface.py").read_text()
    tree = ast.parse(text)
    window = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SlidingWindowSpec")
    method = next(n for n in window.body if getattr(n, "name", "") == "max_admission_blocks_per_request")
    scope: dict[str, Any] = {"cdiv": lambda a, b: -(-a // b)}
    exec(compile(ast.fix_missing_locations(ast.Module([method], [])), "window", "exec"), scope)
    config = functions(release / "config/vllm.py", {"max_concurrent_batches", "max_in_flight_tokens"})
    for stages in (1, 2, 3):
        for traffic in (
            kv.Traffic(8_192, 2_048),
            kv.Traffic(1_048_576, 8_192, async_scheduling=False),
            kv.Traffic(512, 4_096),
        ):
            held = SimpleNamespace(
                parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
                scheduler_config=SimpleNamespace(
                    async_scheduling=traffic.async_scheduling, max_num_batched_tokens=traffic.batched_tokens
                ),
                use_v2_model_runner=True,
            )
            held.max_concurrent_batches = config["max_concurrent_batches"](held)
            flight = config["max_in_flight_tokens"](held)
            assert flight == traffic.in_flight(stages)
            spec = SimpleNamespace(sliding_window=128, extra_retained_tokens=0, block_size=32)
            group = next(one for one in kv.groups(FLASH, traffic) if one.kind == "window")
            wanted = scope["max_admission_blocks_per_request"](spec, flight, traffic.context)
            assert kv.request_blocks(group, FLASH, traffic, stages) == wanted


@pytest.mark.release
def test_records_and_pages_are_those_of_the_release(release: Path) -> None:
    attention = (release / "models/deepseek_v41/attention.py").read_text()
    for text in ("block_size=32,", "528 if self.kv_mxfp8 else 584", "512 if self.kv_mxfp8 else 576"):
        assert text in attention, text
    compressor = (release / "models/deepseek_v41/compressor.py").read_text()
    assert "max(8, 1 << (rows_per_step - 1).bit_length())" in compressor
    assert "num_speculative_tokens + 2" in compressor and "state_dim=2 * self.head_dim" in compressor
    rocm = (release / "models/deepseek_v41/amd/rocm.py").read_text()
    assert "self.PREFILL_CHUNK_SIZE, M, q.shape[-1]" in rocm
    # every release pins Engram's tables with `pin_memory`, which rounds up
    engram = [
        *release.glob("models/deepseek_v41/common/engram.py"),
        *release.glob("models/deepseek_v41/nvidia/engram.py"),
    ]
    assert any("pin_memory=True" in path.read_text() for path in engram)
