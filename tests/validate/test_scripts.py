"""The benchmark scripts: what they measure, and the tables and charts made from the result."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.validate.test_results import result, row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """Imports a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return importlib.import_module


def measured():
    """A summary with every kind of row."""
    prefill = {"tokens": 2048, "heads": 64, "kv_rows": 10367, "rows": 640}
    flops = {"flops": 10**12, "ceiling": "mma"}
    rows = [
        row(), row(provider="stock", p50=100.0, codegen="native"), row(tokens=1024, p50=2.0),
        row(provider="stock-0.30-grid", p50=800.0, codegen="native"),
        row("combine", 1536), row("combine", 1536, timing="events", p50=40.0),
        row("combine", 1536, provider="torch", p50=1000.0, timing="events", codegen="native"),
        row("sparse_prefill", p50=2500.0, arch="sm80", case=prefill, **flops),
        row("sparse_prefill", p50=2600.0, arch="sm80", case=prefill | {"max_smem": 49152}, **flops),
        row("sparse_prefill", p50=2800.0, arch="sm86", codegen="sm86", case=prefill, **flops),
        *(row("sparse_prefill", provider="stock", p50=5000.0 + 600 * (arch == "sm86"), arch=arch, codegen="native",
              case=prefill, ceiling="mma") | {"ceiling_fraction": None} for arch in ("sm80", "sm86")),
        row("sparse_prefill", p50=700.0, arch="sm80", case=prefill | {"tokens": 512, "kv_rows": 8831}, **flops),
        *(row("mhc_fused_post_pre_delayed", tokens, arch="sm80", p50=5.0) for tokens in (6, 12)),
        row("mhc_fused_post_pre_delayed", 6, provider="stock", arch="sm80", p50=10.0, codegen="native"),
        row("mhc_fused_post_pre_delayed", 12, provider="stock", arch="sm80", p50=None, status="RUNTIME_ERROR",
            ceiling_fraction=None),
    ]  # fmt: skip
    roofs = {"copy_gb_per_s": 4251.0, "mma_tflops": {"sm80": 422.0, "sm86": 411.0}}
    return result(*rows, date="2026-11-29T00:00:00Z", **roofs)


def test_the_tables_are_current(scripts):
    assert scripts("generate_tables").main(["--check"]) == 0
    assert scripts("generate_e2e").main(["--check"]) == 0


def test_the_end_to_end_tables_say_what_was_not_well(scripts, tmp_path, capsys):
    tables = scripts("generate_e2e")
    summary = json.loads(tables.SUMMARY.read_text(encoding="utf-8"))
    summary["runs"]["sm80-eager"] |= {"ok": False, "reasons": ["the sink | is lost (/a/path)"]}
    summary["runs"]["faults"]["faults"]["sink dropped"]["found"] = False
    text = tables.tables(summary)
    assert "| no: the sink / is lost |" in text and "| sink dropped | NO |" in text
    page, changed = tmp_path / "page.md", tmp_path / "summary.json"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    changed.write_text(json.dumps(summary))
    arguments = ["--summary", str(changed), "--page", str(page)]
    assert tables.main(["--check", *arguments]) == 1 and "not current" in capsys.readouterr().err
    assert tables.main(arguments) == 0 and tables.main(["--check", *arguments]) == 0
    assert page.read_text().startswith("before\n") and "old" not in page.read_text()


def test_the_digest_has_the_chosen_cases_and_what_others_published(scripts):
    lines = scripts("generate_tables").digest(measured()).splitlines()
    assert lines[2:] == [
        "| sparse_prefill | tokens 2,048, heads 64 | sm80 | 2,500.0 | 2.00x | - | 50 % of `mma.sync` | - |",
        "| sparse_prefill | tokens 2,048, heads 64 | sm80, 48 KB | 2,600.0 | - | - | 50 % of `mma.sync` | - |",
        "| sparse_prefill | tokens 2,048, heads 64 | sm86 | 2,800.0 | 2.00x | - | 50 % of `mma.sync` | - |",
        "| gather | tokens 49,152 | sm80 | 20.0 | 5.00x | 40.00x | 50 % of copy | 7.64x |",
        "| mhc_fused_post_pre_delayed | tokens 6 | sm80 | 5.0 | 2.00x | - | 50 % of copy | 1.30x |",
        "| mhc_fused_post_pre_delayed | tokens 12 | sm80 | 5.0 | runtime error | - | 50 % of copy | 2.89x |",
        "| combine | tokens 1,536 | sm80 | 20.0 | - | 25.00x | 50 % of copy | 22.17x |",
        "",
        "NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, triton 3.6, 2026-11-29. Ceilings measured there: copy 4,251 "
        "GB/s, `mma.sync` 422 TFLOP/s (sm80), `mma.sync` 411 TFLOP/s (sm86).",
        "",
        lines[-1],
    ]
    assert "nothing of it was measured here" in lines[-1] and "A100-class" in lines[-1]


def test_the_full_tables_have_every_row_and_say_what_could_not_run(scripts):
    text = scripts("generate_tables").full(measured())
    assert "`sparse_prefill` (heads 64, rows 640)" in text
    assert "| Case | Code | Latency (us) | vs `stock` | GB/s | TFLOP/s | Of the ceiling |\n" in text
    # the size of the workspace follows from the tokens
    assert "| tokens 2,048 | sm86 | 2,800.0 | 2.00x | 0 | 357 | 50 % of `mma.sync` |" in text
    assert "| tokens 12 | sm80 | 5.0 | runtime error | 0 | 50 % of copy | 2.89x |" in text
    assert "| tokens 1,024 | sm80 | 2.0 | - | - | 0 | 50 % of copy | - |" in text
    assert text.count("\n| tokens") == 9


def test_the_tables_are_rewritten_between_their_markers(scripts, tmp_path: Path, capsys):
    tables = scripts("generate_tables")
    summary, readme, full = (tmp_path / name for name in ("summary.json", "readme.md", "full.md"))
    summary.write_text(json.dumps(measured()))
    for path in (readme, full):
        path.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    arguments = ["--summary", str(summary), "--digest", str(readme), "--full", str(full)]
    assert tables.main(["--check", *arguments]) == 1
    assert "old" in readme.read_text()
    assert tables.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| tokens 1,024 |" in full.read_text() and "| tokens 1,024 |" not in text
    assert tables.main(["--check", *arguments]) == 0


def test_published_figures_name_their_source_and_cases_that_are_measured(scripts):
    from deepinfer_cli.validate.numerics import workloads_of

    pytest.importorskip("torch")
    report = scripts("report")
    document = json.loads(report.PUBLISHED.read_text())
    assert "nothing of it was measured here" in document["source"]
    for figure in document["rows"]:
        sizes = {case.params["tokens"] for case in workloads_of(figure["op"]).bench_cases()}
        assert figure["case"]["tokens"] in sizes, figure["op"]
    assert report.published("combine", {"tokens": 1536})["speedup"] == 22.17
    assert report.published("combine", {"tokens": 1536, "max_smem": 49152}) is None


def test_the_charts_are_drawn_for_what_was_measured(scripts, tmp_path: Path):
    pytest.importorskip("matplotlib", reason="NOT TESTED: charts, there is no matplotlib")
    charts = scripts("generate_charts")
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(measured()))
    assert charts.main(["--summary", str(summary), "--folder", str(tmp_path)]) == 0
    drawn = sorted(path.name for path in tmp_path.iterdir() if path != summary)
    # the combiner was measured at one size: that makes no line
    assert drawn == sorted(
        f"{kind}_{group}.{suffix}"
        for kind in charts.KINDS
        for group in ("sparse-mla", "mhc")
        for suffix in ("png", "svg")
    )
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
    before = (tmp_path / "latency_mhc.svg").read_bytes()
    charts.main(["--summary", str(summary), "--folder", str(tmp_path)])
    assert (tmp_path / "latency_mhc.svg").read_bytes() == before


def test_a_panel_has_a_line_for_each_code_and_each_baseline(scripts):
    charts = scripts("generate_charts")
    rows = measured()["rows"]
    ((title, part),) = charts.panels(rows, ("sparse_prefill",))
    assert title == "sparse_prefill, 64 heads"
    lines = charts.series(part)
    assert list(lines) == ["overlay sm80", "overlay sm80, 48 KB", "overlay sm86", "stock"]
    assert [tokens for tokens, _row in lines["overlay sm80"]] == [512, 2048]


def test_every_op_belongs_to_a_group_and_to_one_script(scripts):
    from deepinfer_cli.overlay import payload
    from deepinfer_cli.validate.ops import ops_of

    report = scripts("report")
    grouped = [op for _title, ops in report.GROUPS.values() for op in ops]
    assert sorted(grouped) == sorted(ops_of(payload.bundled().root))
    measured_by = []
    for path in sorted((ROOT / "benchmarks").glob("microbench_*.py")):
        listing = subprocess.run(
            [sys.executable, str(path), "--help"], capture_output=True, text=True, check=True
        ).stdout
        choices = listing.partition("--op {")[2].partition("}")[0]
        measured_by += choices.split(",")
    assert sorted(measured_by) == sorted(grouped)


def test_a_part_of_an_op_is_never_merged(tmp_path: Path):
    script = ROOT / "benchmarks" / "microbench_sm80_part3.py"
    command = [sys.executable, str(script), "--tokens", "96", "--merge", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--merge takes the place of all rows" in done.stderr


def test_a_script_needs_nothing_installed_but_says_that_there_is_no_gpu(tmp_path: Path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    script = ROOT / "benchmarks" / "microbench_sm80_part3.py"
    code = (
        "import runpy, sys; blocked = ('typer', 'git', 'rich', 'filelock', 'platformdirs', 'packaging')\n"
        "sys.modules.update(dict.fromkeys(blocked)); sys.argv = sys.argv[1:]\n"
        f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "error[" in done.stderr and "nothing can be measured" in done.stderr
