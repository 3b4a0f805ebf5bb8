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
from tests.ops.wrong import wrong_kernels  # noqa: E402

OPS = ("gather", "combine")
WRONG = [(op, name) for op in OPS for name in wrong_kernels(op)]


@pytest.mark.parametrize("op", OPS)
def test_the_oracle_itself_passes_every_smoke_case(op):
    workloads = workloads_of(op)
    for case in workloads.cases("smoke"):
        verdict, _done = check_case(workloads, case, "cpu", getattr(workloads.reference, op))
        assert verdict.ok, f"{case.id}: {verdict.reason}"


@pytest.mark.parametrize(("op", "name"), WRONG)
def test_every_wrong_kernel_fails(op, name):
    workloads = workloads_of(op)
    function = wrong_kernels(op)[name]
    reasons = {}
    for case in workloads.cases("smoke"):
        try:
            reasons[case.id] = check_case(workloads, case, "cpu", function)[0].reason
        except (IndexError, RuntimeError, ValueError) as error:
            reasons[case.id] = f"raised {error}"
    assert any("elements" in reason for reason in reasons.values()), reasons


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_does_nothing_fails(op):
    workloads = workloads_of(op)
    case = next(case for case in workloads.cases("smoke") if case.name in ("odd-length", "two-requests"))

    def nothing(**inputs):
        return inputs.get("out")

    assert not check_case(workloads, case, "cpu", nothing)[0].ok


def _trial(function):
    """A gather whose first run was right, on a CPU."""
    workloads = workloads_of("gather")
    case = next(case for case in workloads.cases("smoke") if case.name == "odd-length")
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    return numerics.Trial(workloads, case, "cpu", function, inputs, want, want)


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
