"""Options of `verify` and `bench` that would do nothing beside each other: refused, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer_cli.errors import UsageError

if TYPE_CHECKING:
    from deepinfer_cli.commands.verify import VerifyOptions

_CASES = frozenset({"interpreter", "numerics"})
_KERNELS = _CASES | {"compile"}
# option → the levels that look at it
_READ_BY = {
    "OPS": _KERNELS,
    "--suite": _CASES,
    "--max-smem": _KERNELS,
    "--arch": _KERNELS | {"live"},
    "--timeout": _KERNELS | {"live"},
}
_WITH_E2E = {"--suite": "--full runs every configuration", "OPS": "DEEPINFER_DISABLE_OPS leaves ops to stock"}


def check_verify(opts: VerifyOptions) -> None:
    """Refuses what does not go together.

    Raises:
        UsageError: an option that nothing would look at (`usage`).
    """
    given = {
        "OPS": bool(opts.ops), "--level": bool(opts.levels), "--suite": opts.suite is not None,
        "--case": opts.case is not None, "--max-smem": opts.max_smem is not None, "--arch": opts.arch is not None,
        "--timeout": opts.timeout_s is not None,
    }  # fmt: skip
    if opts.full and not opts.e2e:
        raise _refusal("--full goes with --e2e", "--suite full runs every case of the levels")
    if opts.e2e:
        for name in ("OPS", "--level", "--suite", "--case", "--max-smem"):
            if given[name]:
                raise _refusal(
                    f"{name} does not go with --e2e", _WITH_E2E.get(name, "leave one of the two out")
                )
        return
    _check_levels(opts.levels, given)
    op = (opts.case or "").partition("[")[0]
    if opts.case is not None and opts.ops and op not in opts.ops:
        raise _refusal(
            f"case {opts.case} is of op {op}, not of {', '.join(opts.ops)}", "--case alone will do"
        )


def _check_levels(levels: tuple[str, ...], given: Mapping[str, bool]) -> None:
    for name, read_by in _READ_BY.items():
        if levels and given[name] and not read_by & set(levels):
            shown = ", ".join(dict.fromkeys(levels))
            what = "level" if len(set(levels)) == 1 else "levels"
            order = [level for level in ("compile", "interpreter", "numerics", "live") if level in read_by]
            raise _refusal(f"{name} means nothing to {what} {shown}", f"it is for {', '.join(order)}")


def check_bench(
    *,
    ops: tuple[str, ...],
    providers: tuple[str, ...],
    torch_from: bool,
    baseline: bool,
    threshold: bool,
    max_smem: bool,
) -> None:
    """Refuses what does not go together.

    Args:
        ops: the ones asked for; empty means all, as of `providers`.
        torch_from: whether that option was given; likewise the others.

    Raises:
        UsageError: an option that nothing would look at (`usage`).
    """
    from deepinfer_cli.validate import baselines

    if threshold and not baseline:
        raise _refusal("--threshold goes with --baseline", "name the earlier result file with --baseline")
    if torch_from and providers and "torch" not in providers:
        raise _refusal(
            "--torch-from is for the provider torch, which --provider leaves out", "--provider torch"
        )
    if torch_from and ops and not baselines.TORCH_OPS & set(ops):
        raise _refusal(
            f"--torch-from is for {', '.join(baselines.TORCH_OPS)}, which is not asked for", "leave it out"
        )
    if max_smem and providers and "overlay" not in providers:
        raise _refusal(
            "--max-smem is for the overlay's kernels, which --provider leaves out", "--provider overlay"
        )
    if baseline and providers and "overlay" not in providers:
        raise _refusal("--baseline compares the overlay, which --provider leaves out", "--provider overlay")


def _refusal(message: str, hint: str) -> UsageError:
    return UsageError(message, code="usage", hint=hint)
