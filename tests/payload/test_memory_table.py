"""The README's table of buffers: it is current, names every allocation of the payload, and tells the truth about growth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.overlay import manifest
from deepinfer_cli.planner import buffers, kv
from deepinfer_cli.planner.shape import FLASH
from scripts import memory_sizes as sizes
from scripts import memory_table as memory

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def test_the_table_is_current() -> None:
    assert memory.main(["--check"]) == 0


def test_a_table_that_is_not_current_is_found_and_rewritten(tmp_path, monkeypatch) -> None:
    old = tmp_path / "README.md"
    old.write_text(f"before\n{memory.BEGIN}\nold\n{memory.END}\nafter\n")
    monkeypatch.setattr(memory, "README", old)
    assert memory.main(["--check"]) == 1
    assert memory.main([]) == 0 and memory.main(["--check"]) == 0
    assert old.read_text().startswith("before\n") and old.read_text().endswith("\nafter\n")
    old.write_text("no place for it")
    with pytest.raises(SystemExit):
        memory.main([])


def test_every_allocation_of_the_payload_is_a_row_or_in_stocks_place() -> None:
    named = {place for one in memory.BUFFERS for place in one.where} | set(memory.AS_STOCK)
    assert set(sizes.allocations(memory.PAYLOAD)) == named


def test_an_allocation_without_a_row_is_named(monkeypatch, capsys) -> None:
    found = [*sizes.allocations(memory.PAYLOAD), "ops/new.py::launch"]
    monkeypatch.setattr(sizes, "allocations", lambda root: found)
    assert memory.main(["--check"]) == 1
    assert "ops/new.py::launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(3)",
        "x.new_zeros(3)",
        "torch.full_like(x, 1)",
        "manager.get_simultaneous(((3,), torch.uint8))",
    ],
)
def test_a_new_allocation_would_be_seen(tmp_path: Path, call: str) -> None:
    (tmp_path / "new.py").write_text(f"def fresh(x):\n    return {call}\n\n\ndef other(x):\n    return x\n")
    (tmp_path / "reference.py").write_text("def oracle():\n    return torch.empty(3)\n")
    assert list(sizes.allocations(tmp_path)) == ["new.py::fresh"]


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_only_what_says_so_grows_with_the_longest_context_and_never_faster(tp: int) -> None:
    short = sizes.Served(tp, context=131_072)
    long = replace(short, context=8 * short.context)
    for one in memory.BUFFERS:
        before, after = one.size(short), one.size(long)
        assert (after == before) == (one.grows == memory.NEVER), one.name
        assert before <= after <= 8 * before, one.name


def test_the_rows_agree_with_the_planner() -> None:
    served = sizes.Served()
    traffic = kv.Traffic(served.context, served.tokens)
    assert sizes.gathered(served) == buffers.workspace(FLASH, range(FLASH.layers), traffic, "0.33.0")
    assert sizes.unpacked(replace(served, tp=1)) == 40 * 8_192 * 4_096 * 2


def test_logits_of_a_chunk_stay_near_what_vllm_reserves() -> None:
    """Its chunks have rows x keys <= 2^27; a row is rounded up to 256 elements."""
    assert sizes.prefill_logits(sizes.Served()) <= buffers.INDEX_LOGITS + 8_192 * 1_024


def test_the_enable_groups_other_ops_are_named_and_allocate_nothing() -> None:
    rest = manifest.load().enable - {op for one in memory.BUFFERS for op in memory._ops_of(one)}
    assert rest >= {"engram", "indexer_k", "kv_insert"}
    assert f"({', '.join(sorted(rest))})" in memory.section()
    for place in sizes.allocations(memory.PAYLOAD):
        assert not place.startswith((*(f"ops/{op}/" for op in rest), "ops/rope_quant/"))
