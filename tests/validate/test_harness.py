"""The harness must see wrong kernels: one that passes everything proves nothing."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernels
pytest.importorskip("torch")

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
