"""The rows of one case, on a CPU: real checks, timers that count instead of measuring."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernels
torch = pytest.importorskip("torch")

from types import SimpleNamespace  # noqa: E402

from deepinfer_cli.validate import bench_worker, numerics, timing, turns  # noqa: E402
from deepinfer_cli.validate.baselines import Provider  # noqa: E402
from deepinfer_cli.validate.ceiling import Roofs  # noqa: E402
from deepinfer_cli.validate.numerics import workloads_of  # noqa: E402

KEYS = [
    "op", "case", "provider", "codegen", "timing", "latency_us", "bytes", "flops", "ceiling_fraction", "status", "arch",
    "ceiling", "roof",
]  # fmt: skip
COMBINE = workloads_of("combine")
ORACLE = COMBINE.reference.combine


def _wrong(**inputs):
    indices, lens = ORACLE(**inputs)
    return indices, lens + 1


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A lock of this test's own."""
    monkeypatch.setattr(turns, "lock_path", lambda: tmp_path / "gpu.lock")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch):
    """What was timed, in turn: the results of the calls, one per sample."""
    results = []

    class Timer:
        def __init__(self, call, sets):
            self.call, self.sets = call, sets

        def sample(self):
            results.append(self.call(self.sets[0])[1].sum().item())
            return 10.0

    monkeypatch.setattr(bench_worker, "_TIMERS", {"graph": Timer, "events": Timer})
    monkeypatch.setattr(bench_worker.timing, "input_sets", lambda inputs, touched: [inputs])
    monkeypatch.setattr(bench_worker.timing, "host_us", lambda call, sets: 3.0)
    return results


def _rows(monkeypatch: pytest.MonkeyPatch, *providers: Provider, seen: str = "sm80", max_smem=None):
    case = next(case for case in COMBINE.cases("smoke") if case.name == "two-requests")
    inputs = COMBINE.make_inputs(case, "cpu") | {"out": None}
    monkeypatch.setattr(bench_worker, "bench_inputs", lambda workloads, case: inputs)
    codegen = bench_worker.Codegen("sm80", {"overlay": {seen}, "baseline": {"native"}})
    session = bench_worker.Session(COMBINE, codegen, Roofs(1e12), "sm80", max_smem)
    rows = bench_worker.bench_case(session, case, list(providers))
    return rows, ORACLE(**inputs)[1].sum().item()


def test_a_row_has_the_keys_of_the_schema_and_a_red_provider_no_latency(timed, monkeypatch):
    ours = Provider("overlay", ORACLE, ("graph", "events"))
    rows, right = _rows(
        monkeypatch, ours, Provider("stock", _wrong), Provider("torch", None, ("events",), "no tree")
    )
    assert [(row["provider"], row["timing"], row["status"], row["codegen"]) for row in rows] == [
        ("overlay", "graph", "PASSED", "sm80"),
        ("overlay", "events", "PASSED", "sm80"),
        ("stock", "graph", "FAILED", "native"),
        ("torch", "events", "SKIPPED", "native"),
    ]
    assert all(list(row)[: len(KEYS)] == KEYS for row in rows)
    assert all(set(row) - set(KEYS) == {"host_us"} for row in rows[:2])
    assert all(set(row) - set(KEYS) == {"reason"} and row["latency_us"] is None for row in rows[2:])
    assert rows[0]["latency_us"] == {"p20": 10.0, "p50": 10.0, "p80": 10.0}
    assert rows[0]["ceiling_fraction"] == round(rows[0]["bytes"] / 10e-6 / 1e12, 4)
    # two timers of ours, and nothing of the one that is wrong
    assert len(timed) == 2 * timing.ROUNDS and set(timed) == {right}


@pytest.mark.parametrize("languages", [["triton"], ["triton", "tilelang"]])
def test_a_worker_measures_every_case_and_says_what_it_found(timed, monkeypatch, languages):
    from deepinfer_sm80 import gate

    small = next(case for case in COMBINE.cases("smoke") if case.name == "two-requests")
    events, limits, watched = [], [], []

    def oracle(**inputs):
        limits.append(gate.device().smem_limit)
        return ORACLE(**inputs)

    fakes = {
        "op_function": lambda op: oracle,
        "bench_inputs": lambda workloads, case: COMBINE.make_inputs(case, "cpu") | {"out": None},
        "measure_roofs": lambda codegen, arch, with_mma: Roofs(4e12, 4e14 if with_mma else None),
        "compile_tiles": lambda op, arch, threads: watched.append((op, arch, threads)),
        "variants_of": lambda op, names, arch: [SimpleNamespace(expects_mma="tilelang" in names)],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(bench_worker, name, fake)
    monkeypatch.setattr(COMBINE, "combine", oracle)
    monkeypatch.setattr(COMBINE, "bench_cases", lambda: (small,))
    monkeypatch.setattr(bench_worker.environment, "describe", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(bench_worker.Codegen, "watch", lambda self: self.seen.update(overlay={"sm80"}))
    monkeypatch.setattr(bench_worker.Codegen, "watch_tilelang", lambda self: watched.append("tilelang"))
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    bench_worker.run(
        {"op": "combine", "force_arch": "sm80", "arch": "sm80", "languages": languages, "max_smem": 49152,
         "providers": ["overlay", "stock"], "parent": None, "torch_from": None, "cases": None, "tokens": [], "threads": 3},
        events.append,
    )  # fmt: skip
    # the ceilings and the case each have a turn
    names = ["turn", "environment", "plan", "start", "turn", "row", "row", "case_done"]
    assert [event["event"] for event in events] == names
    events = [event for event in events if event["event"] != "turn"]
    tiled = "tilelang" in languages
    assert events[0]["environment"] == {"gpu": "NVIDIA H200", "copy_gb_per_s": 4000.0} | (
        {"mma_tflops": {"sm80": 400.0}} if tiled else {}
    )
    assert watched == (["tilelang", ("combine", "sm80", 3)] if tiled else [])
    assert events[2]["params"]["max_smem"] == 49152 and set(limits) == {49152}
    rows = [event["row"] for event in events if event["event"] == "row"]
    assert [(row["provider"], row["status"], row["arch"]) for row in rows] == [
        ("overlay", "PASSED", "sm80"),
        ("stock", "SKIPPED", "sm80"),
    ]


def test_a_limit_on_shared_memory_is_a_part_of_the_case(timed, monkeypatch):
    rows, _right = _rows(monkeypatch, Provider("overlay", ORACLE), Provider("stock", ORACLE), max_smem=49152)
    assert [row["case"]["max_smem"] for row in rows] == [49152, 49152]


@pytest.mark.parametrize(
    ("moved", "flops", "ceiling", "seconds"),
    [(10**9, 0, "copy", 1e-3), (10**9, 10**12, "mma", 4e-3), (10**9, 10**11, "copy", 1e-3)],
)
def test_the_roof_that_takes_longer_is_the_ceiling(moved, flops, ceiling, seconds):
    assert Roofs(1e12, 2.5e14).binding(moved, flops) == (ceiling, pytest.approx(seconds))
    assert Roofs(1e12).binding(moved, flops)[0] == "copy"


def test_a_row_holds_its_roof_and_native_code_has_no_share_of_that_of_mma(monkeypatch):
    workloads = SimpleNamespace(bytes_moved=lambda case: 10**6, flops=lambda case: 10**10)
    codegen = bench_worker.Codegen("sm80", {"overlay": {"sm80"}, "baseline": {"native"}})
    case = SimpleNamespace(op="x", params={})
    latency = {"p50": 50.0}
    for roofs, want in (
        (Roofs(1e12, 4e14), [("mma", 400.0, 0.5), ("mma", 400.0, None)]),
        (Roofs(1e12), [("copy", 1000.0, 0.02), ("copy", 1000.0, 0.02)]),
    ):
        session = bench_worker.Session(workloads, codegen, roofs, "sm80")
        rows = [
            bench_worker._row(session, case, Provider(name), "graph", latency)
            for name in ("overlay", "stock")
        ]
        assert [(row["ceiling"], row["roof"], row["ceiling_fraction"]) for row in rows] == want


def test_host_time_is_that_of_the_function_alone(monkeypatch):
    asked, called = [], []
    workloads = SimpleNamespace(call_kwargs=lambda inputs, style: asked.append(style) or inputs)

    def host_us(call, sets):
        asked.append("timed")
        call(sets[0])
        return 2.0

    monkeypatch.setattr(bench_worker.timing, "host_us", host_us)
    adapted = bench_worker.baselines.adapt(lambda x: called.append(x), workloads, "stock")
    sets = [{"x": number} for number in range(60)]
    assert bench_worker._host(Provider("stock", adapted), adapted, sets) == {"host_us": 2.0}
    assert asked == ["stock"] * timing.HOST_CALLS + ["timed"] and called == [0]
    assert bench_worker._host(Provider("stock", adapted, how="mhc"), adapted, sets) == {}


def test_only_what_tilelang_compiles_is_called_before_it_is_measured(monkeypatch, tmp_path):
    called, listening = [], []
    mine = turns.Turns(lambda event: None, tmp_path / "lock")
    monkeypatch.setattr(mine, "while_tilelang_compiles", lambda: listening.append(True))
    workloads = SimpleNamespace(run=lambda inputs, function: called.append((inputs, function, mine.held)))
    monkeypatch.setattr(bench_worker, "bench_inputs", lambda workloads, case: case.params["tokens"])
    session = bench_worker.Session(workloads, bench_worker.Codegen(None), Roofs(1e12), "sm80")
    cases = [SimpleNamespace(params={"tokens": tokens}) for tokens in (1, 2048, 8192)]
    plain, tiled = Provider("stock-sm80", "no"), Provider("stock", "yes", how="mhc")
    bench_worker.compile_stock(session, cases, [Provider("overlay"), plain], mine)
    assert not called and not listening
    bench_worker.compile_stock(session, cases, [Provider("overlay"), plain, tiled], mine)
    assert called == [(1, "yes", True), (2048, "yes", True)] and listening


def test_only_an_output_that_the_op_can_make_itself_is_left_to_it(monkeypatch):
    def needs(q, out):
        pass

    def may(q, out=None):
        pass

    workloads = SimpleNamespace(OP="x", make_inputs=lambda case, device: {"q": 1, "out": 2})
    for function, want in ((needs, 2), (may, None)):
        monkeypatch.setattr(bench_worker, "op_function", lambda op, function=function: function)
        assert bench_worker.bench_inputs(workloads, None)["out"] == want


@pytest.mark.parametrize("op", ["gather", "combine", "ragged"])
def test_the_public_function_of_an_op_is_found(op):
    assert bench_worker.op_function(op).__name__ in (op, f"build_{op}")


def test_overlay_code_of_another_architecture_gets_no_row(timed, monkeypatch):
    with pytest.raises(RuntimeError, match="not for sm80"):
        _rows(monkeypatch, Provider("overlay", ORACLE), seen="native")


def test_a_timer_that_fails_leaves_no_latency(timed, monkeypatch):
    def broken(call, sets):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(bench_worker._TIMERS, "events", broken)
    rows, _right = _rows(monkeypatch, Provider("overlay", ORACLE, ("graph", "events")))
    assert [(row["status"], row["latency_us"]) for row in rows] == [("RUNTIME_ERROR", None)] * 2
    assert timed == []


@pytest.mark.parametrize(("touched", "free", "want"), [(100, 10**9, 22), (10**9, 10**9, 7), (100, 4800, 6)])
def test_inputs_are_rotated_past_l2_as_far_as_memory_allows(monkeypatch, touched, free, want):
    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    sets = timing.input_sets({"x": torch.zeros(100, dtype=torch.float32)}, touched)
    assert len(sets) == want
    assert len({one["x"].data_ptr() for one in sets}) == want


def test_a_case_that_does_not_fit_is_skipped_and_says_what_it_needs(monkeypatch):
    case = SimpleNamespace(id="x[y]", op="x", memory_bytes=2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * 2**30 - 1, 2**40))
    result = numerics.run_case(None, case, numerics.Level.NUMERICS)
    assert (result.status.value, result.reason) == ("SKIPPED", "needs 5.0 GiB of free device memory")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * 2**30, 2**40))
    assert numerics.run_case(None, case, numerics.Level.NUMERICS).status.value == "RUNTIME_ERROR"
