"""Ops of bindings alone: they are known everywhere, and have no case."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from deepinfer_cli.commands import bench
from deepinfer_cli.errors import UsageError
from deepinfer_cli.validate import ops, verify
from deepinfer_cli.validate.model import Level
from deepinfer_cli.validate.request import Request

MANIFEST = """
[ops.fake]
group = "accelerate"
summary = "has a kernel"
replaces = ["m.py::f"]
relies_on = []

[ops.bare]
group = "enable"
summary = "has none"
replaces = ["m.py::g"]
relies_on = []

[ops.inner]
group = "accelerate"
summary = "replaces nothing"
replaces = []
relies_on = []
"""


@pytest.fixture
def root(case_payload: Path) -> Path:
    (case_payload / "manifest.toml").write_text(MANIFEST)
    return case_payload


def test_they_are_those_that_replace_something_and_have_no_workloads(root: Path):
    assert ops.ops_of(root) == ("fake",)
    assert ops.bindings_only(root) == ("bare",)


def test_a_payload_without_a_manifest_has_none(case_payload: Path):
    assert ops.bindings_only(case_payload) == ()


def request(root: Path, **more) -> Request:
    return Request(None, root, Path(sys.executable), (Level.STATIC,), **more)


def test_verify_says_so_whether_it_was_named_or_not(root: Path):
    assert verify.verify(request(root)).notes == ("no kernel of its own, checked by level live: bare",)
    assert verify.verify(request(root, ops=("fake",))).notes == ()
    with pytest.raises(UsageError) as caught:
        verify.verify(request(root, ops=("fake", "bare")))
    assert (caught.value.code, caught.value.hint) == (
        "op-without-kernel",
        "level live checks that it is bound",
    )


def test_an_unknown_op_is_told_of_both_kinds(root: Path):
    with pytest.raises(UsageError) as caught:
        verify.verify(request(root, ops=("bare", "other")))
    assert caught.value.code == "op-unknown" and "other" in caught.value.message
    assert caught.value.hint == "ops are fake; without a kernel of their own: bare"


@pytest.mark.parametrize("case", ["foo", "foo[bar]", "[x]"])
def test_an_unknown_case_is_no_op(root: Path, case: str):
    with pytest.raises(UsageError) as caught:
        verify.verify(request(root, case=case))
    assert (caught.value.code, caught.value.message) == ("case-unknown", f"there is no case {case}")


def test_a_case_of_an_op_without_a_kernel_says_so(root: Path):
    with pytest.raises(UsageError) as caught:
        verify.verify(request(root, case="bare[x]"))
    assert caught.value.code == "op-without-kernel"


def test_bench_has_nothing_to_measure(root: Path):
    with pytest.raises(UsageError) as caught:
        bench._ops(bench.BenchOptions(ops=("bare",)), root)
    assert (caught.value.code, caught.value.hint) == ("op-without-kernel", "there is nothing to measure")


def test_the_bundled_payload_has_a_binding_for_each():
    from deepinfer_sm80 import bindings

    from deepinfer_cli.overlay import payload

    assert set(ops.bindings_only(payload.bundled().root)) <= set(bindings.OPS)


def test_warming_up_passes_them_over(monkeypatch: pytest.MonkeyPatch):
    warm = importlib.import_module("deepinfer_sm80.warm")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    warm.op_up("no_such_op")
