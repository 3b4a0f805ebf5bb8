"""What a server's log says of the overlay: lines as real servers write them."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer_cli.validate.serving import live

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "checks" / "e2e_2026-11-30.json"
BIND = "INFO 11-30 06:59:38 [__init__.py:116] DeepInfer 0.1.0: sm80; bound {bound}{off} (vllm.models.deepseek_v41.nvidia.model)"


def line(process, bound, off=""):
    return f"({process}) {BIND.format(bound=bound, off=off)}"


def test_the_last_line_of_the_engine_counts():
    found = live.of_log(
        [
            line("APIServer pid=1", "combine"),
            line("EngineCore_DP0 pid=2", "combine"),
            line("EngineCore_DP0 pid=2", "combine, gather"),
            "(EngineCore_DP0 pid=2) INFO 11-30 06:59:41 [x.py:1] something else",
        ]
    )
    assert (found.state, found.bound, found.pids) == ("live", ("combine", "gather"), (2,))
    assert (found.arch, found.forced) == ("sm80", False)


def test_workers_count_rather_than_the_engine_and_all_must_have_it():
    both = [line(f"Worker_TP{rank} pid={rank + 10}", "combine, gather") for rank in range(2)]
    engine = "(EngineCore_DP0 pid=2) INFO x"
    assert live.of_log([engine, *both]).pids == (10, 11)
    one = live.of_log([engine, both[0], "(Worker_TP1 pid=11) INFO x"])
    assert one.state == "unknown" and "process 11" in one.told_by
    differ = live.of_log([both[0], line("Worker_TP1 pid=11", "combine")])
    assert differ.bound == ("combine",)


def test_a_process_that_is_renamed_is_one():
    found = live.of_log([line("VllmWorker-0 pid=5", "combine"), "(Worker_TP0 pid=5) INFO x"])
    assert (found.state, found.pids) == ("live", (5,))


def test_an_engine_that_was_forked_has_what_its_parent_bound():
    """As seen on a GPU: `vllm serve` imports the model, then forks."""
    chosen = "INFO 11-30 09:36:55 [choice.py:46] DeepInfer: V4.1's attention layers are vLLM's portable Triton class"
    parent = line("APIServer pid=1", "attention, combine", "; switched off: gather")
    found = live.of_log([parent, f"(EngineCore pid=2) {chosen}"])
    assert (found.state, found.bound, found.off) == ("live", ("attention", "combine"), ("gather",))
    assert found.pids == (2,)
    assert live.of_log([f"(EngineCore pid=2) {chosen}"]).state == "off"
    assert live.of_log([parent, "(EngineCore pid=2) INFO x"]).state == "off"


def test_off_and_unknown():
    assert live.of_log(["(EngineCore pid=2) INFO x"]).state == "off"
    assert (
        live.of_log([line("EngineCore pid=2", "nothing", "; switched off: combine, gather")]).state == "off"
    )
    assert live.of_log(["INFO x", line("APIServer pid=1", "combine")]).state == "unknown"
    assert live.of_log([]).state == "unknown"


def test_what_is_switched_off_and_not_installed():
    text = line("EngineCore pid=2", "gather", "; not installed: yoco; switched off: combine, ragged")
    found = live.of_log([f"\x1b[36m{text}\x1b[0m"])
    assert (found.bound, found.off) == (("gather",), ("combine", "ragged"))


def test_lines_of_a_real_engine():
    runs = json.loads(RUNS.read_text())["runs"]
    lines = [
        text.replace("MainProcess", "EngineCore") for text in runs["sm80-eager"]["notable"]
        if not text.endswith("yo")
    ]  # fmt: skip
    # the record cuts long lines: those that are whole
    found = live.of_log(text for text in lines if text.endswith(")") or "DeepInfer" not in text)
    assert found.state == "live" and found.forced and found.arch == "sm80"
    assert {"sparse_decode", "mhc_post", "yoco"} <= set(found.bound)


def test_the_kv_cache(tmp_path):
    log = tmp_path / "log"
    log.write_text("(EngineCore pid=2) INFO [kv_cache_utils.py:1] GPU KV cache size: 3,608,586 tokens\n")
    assert live.read(log)[1] == 3_608_586
