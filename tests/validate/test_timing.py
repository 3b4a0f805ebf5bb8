from __future__ import annotations

import pytest

pytest.importorskip("torch")

from deepinfer_cli.validate import runner, timing
from deepinfer_cli.validate.model import CaseResult, Level, Status


def test_quantiles_of_the_samples():
    assert timing.quantiles([float(n) for n in range(1, 12)]) == {"p20": 3.0, "p50": 6.0, "p80": 9.0}
    assert timing.quantiles([5.0]) == {"p20": 5.0, "p50": 5.0, "p80": 5.0}


def test_timers_take_turns_and_the_order_is_reversed_every_other_round():
    order = []

    class Fake:
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

        def sample(self) -> float:
            order.append(self.name)
            return self.value

    found = timing.alternate({"a": Fake("a", 1.0), "b": Fake("b", 2.0)}, rounds=4)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found["b"]["p50"] == 2.0


def _result(name: str, status: Status) -> dict[str, object]:
    return {"event": "result", "result": CaseResult(name, "fake", Level.NUMERICS, status).to_json()}


def test_a_context_that_an_illegal_access_ended_is_left_for_a_new_worker(fake_job, monkeypatch):
    plan = {"event": "plan", "cases": ["a", "b", "c"]}
    first = [plan, {"event": "start", "case": "a"}, _result("a", Status.RUNTIME_ERROR), {"event": "restart"}]
    second = [plan | {"cases": ["b", "c"]}, _result("b", Status.PASSED), _result("c", Status.PASSED)]
    feed = iter([first, second])
    asked = []

    def events(job, cases, crew):
        asked.append(cases)
        yield from next(feed)
        yield runner.WorkerEnd(Status.PASSED)

    monkeypatch.setattr(runner, "events", events)
    found = [(item.case, item.status) for item in runner.run_cases(fake_job("a"))]
    assert found == [("a", Status.RUNTIME_ERROR), ("b", Status.PASSED), ("c", Status.PASSED)]
    assert asked == [None, ["b", "c"]]
