from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_cli.errors import FailedError
from deepinfer_cli.validate import results

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.11",
    "triton": "3.6",
    "vllm": None,
}


def row(op="gather", tokens=49152, provider="overlay", p50=20.0, timing="graph", codegen="sm80", **more):
    latency = None if p50 is None else {"p20": p50, "p50": p50, "p80": p50}
    return {
        "op": op, "case": {"tokens": tokens}, "provider": provider, "codegen": codegen, "timing": timing,
        "latency_us": latency, "bytes": 1000, "flops": 0, "ceiling_fraction": 0.5, "status": "PASSED", **more,
    }  # fmt: skip


def result(*rows, **environment):
    return {"schema_version": 1, "environment": ENVIRONMENT | environment, "rows": list(rows)}


def test_a_ratio_is_only_made_between_rows_of_equal_timing_and_case():
    ours = row()
    rows = [
        ours,
        row(provider="stock", p50=100.0, codegen="native"),
        row(provider="torch", p50=1000.0, timing="events"),
        row(provider="stock-0.30-grid", p50=500.0, tokens=16384),
    ]
    assert results.speedup(rows, ours, "stock") == 5.0
    assert results.speedup(rows, ours, "torch") is None
    assert results.speedup(rows, ours, "stock-0.30-grid") is None
    assert (
        results.speedup([*rows, row(timing="events", p50=40.0)], row(timing="events", p50=40.0), "torch")
        == 25.0
    )


def test_a_ratio_is_only_made_within_one_run():
    ours = row(codegen="sm86", arch="sm86")
    rows = [ours, row(provider="stock", p50=100.0, arch="sm80"), row(provider="stock", p50=60.0, arch="sm86")]
    assert results.speedup(rows, ours, "stock") == 3.0
    assert len({results.key(item) for item in rows}) == 3
    # an overlay row says by its code alone what it is, so that files without `arch` compare
    assert results.key(row(arch="sm80")) == results.key(row())


def test_architectures_and_limits_stand_side_by_side_in_one_file():
    small = {"tokens": 49152, "max_smem": 49152}
    old = result(
        row(arch="sm80"), row(arch="sm80", case=small), copy_gb_per_s=4000.0, mma_tflops={"sm80": 422.0}
    )
    new = result(row(arch="sm86", codegen="sm86"), copy_gb_per_s=4100.0, mma_tflops={"sm86": 400.0})
    merged = results.merge(old, new)
    assert [(item["arch"], item["case"].get("max_smem")) for item in merged["rows"]] == [
        ("sm80", None),
        ("sm80", 49152),
        ("sm86", None),
    ]
    assert merged["environment"]["mma_tflops"] == {"sm80": 422.0, "sm86": 400.0}
    assert merged["environment"]["copy_gb_per_s"] == 4100.0
    again = results.merge(merged, result(row(arch="sm80", case=small, p50=1.0)))
    assert [item["latency_us"]["p50"] for item in again["rows"]] == [20.0, 20.0, 1.0]
    assert again["environment"]["mma_tflops"] == {"sm80": 422.0, "sm86": 400.0}


def test_merging_replaces_the_ops_that_were_measured_again():
    old = result(row(p50=30.0), row("combine", 96))
    merged = results.merge(old, result(row(p50=20.0), vllm="0.33.0"))
    assert [(item["op"], item["latency_us"]["p50"]) for item in merged["rows"]] == [
        ("combine", 20.0),
        ("gather", 20.0),
    ]
    assert merged["environment"]["vllm"] == "0.33.0"
    assert results.merge(None, old) == old
    kept = results.merge(result(row("combine"), vllm="0.33.0"), result(row()))
    assert kept["environment"]["vllm"] == "0.33.0"


def test_results_of_two_machines_are_not_one_result():
    with pytest.raises(FailedError, match="gpu is NVIDIA H200 and NVIDIA A100"):
        results.merge(result(row()), result(row(), gpu="NVIDIA A100"))


def test_results_of_two_overlays_or_two_vllms_are_not_one_result():
    old = result(row("combine"), commit="payload aaaa, git 1", vllm="0.33.0")
    with pytest.raises(FailedError, match="overlay is payload aaaa and payload bbbb"):
        results.merge(old, result(row(), commit="payload bbbb, git 1", vllm="0.33.0"))
    with pytest.raises(FailedError, match=r"vllm is 0\.33\.0 and 0\.32\.0"):
        results.merge(old, result(row(), commit="payload aaaa", vllm="0.32.0"))
    assert len(results.merge(old, result(row(), commit="payload aaaa, git 2"))["rows"]) == 2


def _of(payload: str, *rows, **kernels):
    return result(*rows, commit=f"payload {payload}, git 1", kernels=kernels)


def test_an_overlay_that_has_grown_keeps_what_was_measured_of_unchanged_ops():
    old = _of("aaaa", row("combine"), row(arch="sm80"), combine="1", gather="2")
    merged = results.merge(old, _of("bbbb", row("insert"), insert="3"))
    assert [item["op"] for item in merged["rows"]] == ["combine", "gather", "insert"]
    assert merged["environment"]["kernels"] == {"combine": "1", "gather": "2", "insert": "3"}
    # another architecture of the same kernels, on the grown overlay
    again = results.merge(merged, _of("cccc", row(arch="sm86", codegen="sm86"), gather="2"))
    assert [(item["op"], item.get("arch")) for item in again["rows"][1:]] == [
        ("gather", "sm80"),
        ("insert", None),
        ("gather", "sm86"),
    ]
    assert again["environment"]["commit"] == "; ".join(
        f"payload {one}, git 1" for one in ("aaaa", "bbbb", "cccc")
    )
    # nothing of the old ones is left
    only = results.merge(_of("aaaa", row(), gather="1"), _of("bbbb", row(), gather="2"))
    assert only["environment"]["commit"] == "payload bbbb, git 1"


def test_kernels_that_have_changed_leave_no_row_of_the_old_ones_behind():
    small = {"tokens": 49152, "max_smem": 49152}
    old = _of("aaaa", row(arch="sm80"), row(arch="sm86"), row(arch="sm80", case=small), row("combine"), gather="1", combine="2")  # fmt: skip
    new = _of("bbbb", row(arch="sm80", p50=1.0), gather="9")
    assert results.changed_ops(old, new) == {"gather"}
    merged = results.merge(old, new)
    assert [(item["op"], item["latency_us"]["p50"]) for item in merged["rows"]] == [
        ("combine", 20.0),
        ("gather", 1.0),
    ]
    assert merged["environment"]["kernels"] == {"gather": "9", "combine": "2"}


def test_a_file_that_does_not_say_which_kernels_it_measured_is_of_one_overlay():
    old = result(row("combine"), commit="payload aaaa")
    with pytest.raises(FailedError, match="overlay is payload aaaa and payload bbbb"):
        results.merge(old, _of("bbbb", row(), gather="1"))
    merged = results.merge(old, _of("aaaa", row(), gather="1"))
    assert len(merged["rows"]) == 2 and merged["environment"]["kernels"] == {"gather": "1"}
    # an op whose kernels the file does not know is not known to be the same
    unknown = _of("aaaa", row(), row("combine"), combine="2")
    assert [item["op"] for item in results.merge(unknown, _of("bbbb", row(), gather="1"))["rows"]] == ["combine", "gather"]  # fmt: skip


def test_changes_compare_the_overlay_alone():
    old = result(row(p50=20.0), row(tokens=16384, p50=5.0), row(provider="stock", p50=1.0))
    both, gone = results.changes(old, result(row(p50=23.0), row(provider="stock", p50=9.0)))
    assert [change.ratio for change in both] == [1.15]
    assert [item["case"] for item in gone] == [{"tokens": 16384}]


def test_files_are_read_back_also_from_the_json_document(tmp_path: Path):
    path = tmp_path / "new folder" / "result.json"
    results.write(result(row()), path)
    assert results.read(path) == result(row())
    path.write_text(json.dumps({"command": "bench", "data": result(row())}))
    assert results.read(path) == result(row())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 2, "rows": []}', '{"schema_version": 1, "rows": 3}']
)
def test_what_is_no_result_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FailedError) as caught:
        results.read(path)
    assert caught.value.code == "result-unreadable"
