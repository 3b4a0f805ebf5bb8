"""Options that do nothing together are refused, and say what to do instead."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli
from tests.conftest import FakeVllm


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("verify --e2e --suite full", "--suite does not go with --e2e", "--full runs"),
        ("verify --e2e --suite smoke", "--suite does not go with --e2e", "--full runs"),
        ("verify gather --e2e", "OPS does not go with --e2e", "DEEPINFER_DISABLE_OPS"),
        ("verify --e2e --level live", "--level does not go with --e2e", "leave one"),
        ("verify --e2e --case x", "--case does not go with --e2e", "leave one"),
        ("verify --e2e --max-smem 1", "--max-smem does not go with --e2e", "leave one"),
        ("verify --full", "--full goes with --e2e", "--suite full"),
        ("verify gather --level static", "OPS means nothing to level static", "it is for compile"),
        ("verify gather --level live", "OPS means nothing to level live", "it is for compile"),
        ("verify --suite full --level static --level compile",
         "--suite means nothing to levels static, compile", "it is for interpreter, numerics"),
        ("verify --suite full --level live", "--suite means nothing to level live", "it is for interpreter"),
        ("verify --max-smem 49152 --level live", "--max-smem means nothing to level live", "it is for compile"),
        ("verify --arch sm80 --level static", "--arch means nothing to level static", "it is for compile"),
        ("verify --timeout 5 --level static", "--timeout means nothing to level static", "it is for compile"),
        ("verify gather --case combine[x]", "case combine[x] is of op combine, not of gather", "--case alone"),
        ("bench --threshold 0.2", "--threshold goes with --baseline", "name the earlier"),
        ("bench --torch-from x --provider stock", "--torch-from is for the provider torch", "--provider torch"),
        ("bench gather --torch-from x", "--torch-from is for combine", "leave it out"),
        ("bench --max-smem 1 --provider stock", "--max-smem is for the overlay's kernels", "--provider overlay"),
        ("bench --baseline x --provider stock", "--baseline compares the overlay", "--provider overlay"),
    ],
)  # fmt: skip
def test_what_does_nothing_together_is_refused(
    cli: Cli, fake: FakeVllm, arguments: str, message: str, hint: str
) -> None:
    run = cli(*arguments.split(), "--target", fake.site)
    assert (run.code, run.out) == (2, "")
    assert f"error[usage]: {message}" in run.err and f"hint: {hint}" in run.err


@pytest.mark.parametrize(
    "arguments",
    [
        "gather --level static --level compile",
        "--arch sm80 --level live",
        "--suite full --level static --level numerics",
        "--case gather[x] --level static",
        "--timeout 100 --level numerics",
    ],
)
def test_what_one_of_the_levels_looks_at_is_taken(cli: Cli, fake: FakeVllm, arguments: str) -> None:
    assert "means nothing" not in cli("verify", *arguments.split(), "--target", fake.site).err
