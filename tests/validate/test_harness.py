"""The harness must see wrong kernels: one that passes everything proves nothing."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.kernels
pytest.importorskip("torch")

import torch  # noqa: E402

from deepinfer_cli.validate import numerics  # noqa: E402
from deepinfer_cli.validate.numerics import check_case, workloads_of  # noqa: E402
from deepinfer_cli.validate.tensors import clone_inputs  # noqa: E402
from tests.ops.catalog import OPS, oracle, wrong_kernels  # noqa: E402

WRONG = wrong_kernels()


@pytest.mark.parametrize("op", OPS)
def test_the_oracle_itself_passes_every_smoke_case(op):
    workloads = workloads_of(op)
    for case in workloads.cases("smoke"):
        verdict, _done = check_case(workloads, case, "cpu", oracle(op))
        assert verdict.ok, f"{case.id}: {verdict.reason}"


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in WRONG[op]])
def test_every_wrong_kernel_fails(op, name):
    workloads, reasons = workloads_of(op), {}
    for case in workloads.cases("smoke"):
        try:
            reasons[case.id] = check_case(workloads, case, "cpu", WRONG[op][name])[0].reason
        except (IndexError, RuntimeError, ValueError) as error:
            reasons[case.id] = f"raised {error}"
        if "elements" in reasons[case.id] or "cosine" in reasons[case.id]:
            return
    pytest.fail(f"nothing sees it: {reasons}")


def test_the_faults_that_must_be_seen_are_planted():
    """Row off by one, scale applied twice, sink in the numerator, missing mask, wrong split merge, unrotated decode."""
    assert {"row-off-by-one", "scale-twice", "missing-mask", "sink-in-numerator"} <= set(
        WRONG["sparse_prefill"]
    )
    assert {
        "off-by-one-row", "scale-twice", "missing-mask", "sink-in-the-numerator", "merged-without-maxima", "unrotated",
    } <= set(WRONG["sparse_decode"])  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_does_nothing_fails(op):
    """It returns outputs as large as they should be; or leaves what it was given."""
    workloads = workloads_of(op)
    seen = False
    for case in workloads.cases("smoke"):
        inputs = workloads.make_inputs(case, "cpu")
        made = None if "out" in inputs and inputs["out"] is not None else oracle(op)(**clone_inputs(inputs))
        blank = _blank(made) if made is not None else inputs.get("out")
        try:
            seen = not check_case(workloads, case, "cpu", lambda blank=blank, **_inputs: blank)[0].ok
        except (IndexError, RuntimeError) as error:
            # an index list of nonsense cannot be followed
            seen = bool(str(error))
        if seen:
            return
    pytest.fail("nothing sees it")


def _blank(made):
    tensors = made if isinstance(made, tuple) else (made,)
    blank = tuple(torch.zeros_like(tensor) for tensor in tensors)
    return blank if isinstance(made, tuple) else blank[0]


def _trial(function):
    """A gather whose first run was right, on a CPU."""
    workloads = workloads_of("gather")
    case = next(case for case in workloads.cases("smoke") if case.name == "odd-length")
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    return numerics.Trial(workloads, case, "cpu", function, inputs, want, want)


def test_a_case_says_which_language_ran(monkeypatch: pytest.MonkeyPatch):
    from deepinfer_sm80 import tile

    monkeypatch.setattr(tile, "kernel", lambda variant: variant.name)
    case = SimpleNamespace(id="x[a]", op="x", gpu_only=False)
    workloads = SimpleNamespace(
        cases=lambda suite: (case, SimpleNamespace(id="x[b]", op="x", gpu_only=False))
    )

    def run_case(_workloads, item, level):
        if item is case:
            assert tile.kernel(SimpleNamespace(name="tiled")) == "tiled"
        return numerics.CaseResult(item.id, "x", level, numerics.Status.PASSED)

    monkeypatch.setattr(numerics, "workloads_of", lambda op: workloads)
    monkeypatch.setattr(numerics, "run_case", run_case)
    events = []
    request = {"level": "numerics", "op": "x", "suite": "smoke", "cases": None}
    numerics.run(request | {"languages": ["triton", "tilelang"]}, events.append)
    results = [event["result"] for event in events if event["event"] == "result"]
    assert [result["extra"] for result in results] == [{"language": "tilelang"}, {"language": "triton"}]


def test_a_kernel_that_is_wrong_now_and_then_fails():
    oracle, calls = workloads_of("gather").reference.gather, []

    def flaky(**inputs):
        oracle(**inputs)
        calls.append(None)
        if len(calls) == 7:
            inputs["out"][0, 0, 0] += 1

    assert numerics._repeat(_trial(oracle)) == ("", {"repeats": 20})
    assert numerics._repeat(_trial(flaky))[0] == "out: run 8 differs from run 1"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs of Python calls: `record` keeps a call while a graph is captured, and makes it otherwise."""
    capturing = []

    class Graph:
        def __init__(self):
            self.calls = []

        def replay(self):
            for call in self.calls:
                call()

    @contextmanager
    def capture(graph):
        capturing.append(graph)
        yield
        capturing.pop()

    def record(call):
        capturing[-1].calls.append(call) if capturing else call()

    stream = SimpleNamespace(wait_stream=lambda _other: None)
    fakes = {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda _stream: nullcontext(),
        "CUDAGraph": Graph, "graph": capture, "synchronize": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return record


def test_a_kernel_that_keeps_what_it_read_at_capture_fails(graphs):
    oracle = workloads_of("gather").reference.gather

    def keeps_the_table(**inputs):
        table = inputs["block_table"].clone()
        graphs(lambda: oracle(**{**inputs, "block_table": table}))

    def reads_it_again(**inputs):
        graphs(lambda: oracle(**inputs))

    done = {"graph": "replayed, also with other inputs"}
    assert numerics._replay_graph(_trial(reads_it_again)) == ("", done)
    assert numerics._replay_graph(_trial(keeps_the_table))[0].startswith("graph replay: out:")
    assert numerics._replay_graph(_trial(lambda **_inputs: None))[0].startswith("graph replay: out:")


def test_a_kernel_that_is_wrong_on_another_card_fails(monkeypatch: pytest.MonkeyPatch):
    from deepinfer_sm80 import gate

    oracle = workloads_of("gather").reference.gather
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")

    def wrong_on_large_cards(**inputs):
        oracle(**inputs)
        if gate.device().sm_count > 128:
            inputs["out"][0, 0, 0] += 1

    assert numerics._sweep_sm_counts(_trial(oracle)) == ("", {"sm_counts": [72, 132]})
    assert numerics._sweep_sm_counts(_trial(wrong_on_large_cards))[0].startswith("with 132 SMs: out:")


@pytest.mark.parametrize(("threads", "level", "want"), [(4, "numerics", True), (0, "numerics", False), (4, "interpreter", False)])  # fmt: skip
def test_tilelang_kernels_are_compiled_together_before_the_first_case(monkeypatch, threads, level, want):
    from deepinfer_sm80 import gate

    from deepinfer_cli.validate import interpreter

    steps = []
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    monkeypatch.setattr(interpreter, "install", lambda: None)
    monkeypatch.setattr(numerics, "compile_tiles", lambda op, arch, count: steps.append((op, arch, count, gate.device().smem_limit)))  # fmt: skip
    monkeypatch.setattr(numerics, "watch_tiles", lambda: steps.append("watched") or [])
    case = SimpleNamespace(id="both[a]", gpu_only=False)
    monkeypatch.setattr(numerics, "workloads_of", lambda op: SimpleNamespace(cases=lambda suite: (case,)))
    passed = numerics.CaseResult("both[a]", "both", numerics.Level(level), numerics.Status.PASSED)
    monkeypatch.setattr(numerics, "run_case", lambda workloads, case, level: steps.append(case.id) or passed)
    request = {
        "op": "both",
        "level": level,
        "suite": "smoke",
        "cases": None,
        "languages": ["triton", "tilelang"],
    }
    events = []
    numerics.run(request | {"threads": threads, "max_smem": 49152}, events.append)
    # the limit holds for what is compiled, and what is compiled ahead is not taken for a launch
    ahead = [("both", "sm86", 4, 49152)] if want else []
    watched = [] if level == "interpreter" else ["watched"]
    assert steps == [*ahead, *watched, "both[a]"]
    assert [event["event"] for event in events] == ["plan", "start", "result"]
