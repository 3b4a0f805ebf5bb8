"""What several commands do: name the target, report an unfinished transaction, describe GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.errors import DeepInferError, FailedError, Interruption
from deepinfer_cli.output import Output
from deepinfer_cli.render import Table, joined, plural, size, table

if TYPE_CHECKING:
    # it brings `packaging`, which `status` does not need
    from deepinfer_cli.overlay.plan import FileChange, Plan


def locate(where: TargetOptions, out: Output) -> Target:
    """The target, said aloud: which vLLM, why, and what else is visible.

    Raises:
        UnsupportedError: there is none.
    """
    from deepinfer_cli.detect.vllm import find_target

    target = find_target(target=where.target, python=where.python)
    announce(target, out)
    return target


def announce(target: Target, out: Output) -> None:
    """Says which vLLM was taken and why."""
    out.note(f"vLLM {target.version or 'of unknown version'} in {target.root} ({target.reason})")
    for other in target.others:
        out.warn(f"another vLLM is visible and not touched: {other}")
    for text in target.notes:
        out.note(f"note: {text}")


def with_own_python(where: TargetOptions, target: Target) -> TargetOptions:
    """`where` with the interpreter of the virtual environment that a `--target` lies in: what runs kernels needs it."""
    prefix = target.parent.parents[2] if len(target.parent.parents) > 2 else target.parent
    python = prefix / "bin" / "python"
    known = where.python is not None or target.kind is not TargetKind.ENVIRONMENT or where.target is None
    if known or not ((prefix / "pyvenv.cfg").is_file() and python.exists()):
        return where
    return TargetOptions(where.target, python)


@contextmanager
def interruptible(where: Target | Path, options: TargetOptions) -> Iterator[None]:
    """Around all that a writer does: SIGTERM and SIGHUP are as Ctrl-C, and the error says what state it leaves.

    Args:
        where: the target, or the folder that held a vLLM which is gone.

    Raises:
        Interruption: one of them came.
    """
    from deepinfer_cli.overlay.signals import interruptible, shielded

    with interruptible():
        try:
            yield
        except KeyboardInterrupt as error:
            with shielded():
                raise Interruption(
                    f"interrupted{_state_left(where)}",
                    code="interrupted",
                    hint=f"deepinfer status{options.arguments}",
                ) from error


def _state_left(where: Target | Path) -> str:
    from deepinfer_cli.overlay.inspect import inspect

    try:
        found = inspect(where) if isinstance(where, Target) else None
    except (DeepInferError, OSError):
        return ""
    if found is None:
        return ""
    return "; " + {
        "installed": "the overlay is installed, every file of it",
        "not-installed": "the overlay is not installed, and no file of it is left",
        "interrupted": "an earlier transaction is unfinished",
    }.get(found.state, f"the overlay is {found.state}")


def target_data(target: Target) -> dict[str, Any]:
    """The target for the JSON document."""
    return {
        "root": str(target.root),
        "kind": target.kind,
        "version": target.version,
        "layout": target.layout,
        "python": target.python and str(target.python),
        "reason": target.reason,
        "others": [str(path) for path in target.others],
        "notes": list(target.notes),
    }


def gpu_data(report: GpuReport) -> dict[str, Any]:
    """The GPUs for the JSON document."""
    return {
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "uuid": gpu.uuid,
                "arch": gpu.arch,
                "memory_bytes": gpu.memory_bytes,
                "mig": gpu.mig,
                "served": gpu.served,
            }
            for gpu in report.gpus
        ],
        "driver": report.driver,
        "cuda_driver": report.cuda_driver,
        "source": report.source,
        "problem": report.problem,
        "cuda_visible_devices": report.visible,
    }


def gpu_text(gpu: Gpu) -> str:
    """One GPU in a few words."""
    parts = [gpu.name, gpu.arch or "capability unknown"]
    if gpu.memory_bytes:
        parts.append(f"{gpu.memory_bytes / 2**30:.0f} GiB")
    return ", ".join(parts + (["MIG"] if gpu.mig else []) + ([] if gpu.served else ["not served"]))


def refuse_pending(target: Target | Path, where: TargetOptions) -> None:
    """For commands that may not write: an unfinished transaction is reported, not repaired.

    Args:
        target: a target, or its state folder.

    Raises:
        FailedError: there is one (`transaction-interrupted`).
    """
    from deepinfer_cli.overlay.journal import pending

    state_dir = target.state_dir if isinstance(target, Target) else target
    journal = pending(state_dir)
    if journal is not None:
        raise FailedError(
            f"an earlier {journal.kind} was interrupted, and its transaction is unfinished",
            code="transaction-interrupted",
            hint=f"`deepinfer rollback{where.arguments}` or `deepinfer install{where.arguments}` finishes or undoes "
            "it first",
            paths=(state_dir / "journal.json",),
        )


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan for the JSON document."""
    return {
        "overlay_version": plan.overlay_version,
        "payload_digest": plan.payload_digest,
        "match": plan.match,
        "release": plan.release,
        "ops": [
            {
                "name": op.name,
                "group": op.group,
                "installed": op.installed,
                "differing": list(op.differing),
                "reason": op.reason,
            }
            for op in plan.ops
        ],
        "skip": list(plan.skip),
        "adopts": plan.adopts,
        "upgrade_from": plan.upgrade_from,
        "changes": [change_data(change) for change in plan.changes],
        "notes": list(plan.notes),
    }


def change_data(change: FileChange) -> dict[str, Any]:
    """One file of a plan for the JSON document."""
    return {
        "path": change.path,
        "action": change.action,
        "owner": change.owner,
        "before_sha256": change.before_sha256,
        "after_sha256": change.after_sha256,
        "note": change.note,
    }


def plan_tables(plan: Plan, *, every_file: bool) -> tuple[Table, ...]:
    """The ops of a plan and the files it writes, if any; payload files are one row per action unless `every_file`."""
    ops = table(
        ("Op", "Group", "Install", "Reason"),
        ((op.name, op.group, "yes" if op.installed else "no", op.reason) for op in plan.ops),
        title="Ops",
    )
    files = file_table(plan.writes, every_file=every_file, hook="four marked lines at its end", payload="")
    return (ops, files) if files.rows else (ops,)


def file_table(changes: tuple[FileChange, ...], *, every_file: bool, hook: str, payload: str) -> Table:
    """The files that change; `hook` and `payload` say what happens to each kind, where a change does not itself."""
    rows: list[tuple[str, str, str]] = []
    groups: dict[str, list[FileChange]] = {}
    for change in changes:
        if change.owner == "payload" and not (every_file or change.note):
            groups.setdefault(change.action.value, []).append(change)
        else:
            rows.append((change.action.value, change.path, change.note or _what(change, hook, payload)))
    for action, group in groups.items():
        amount = sum(len(change.content or b"") for change in group)
        text = plural(len(group), "file") + (f", {size(amount)}" if amount else "")
        rows.insert(0, (action, "vllm/deepinfer_sm80/", text))
    return table(("Action", "Path", "What"), rows, title="Files")


def _what(change: FileChange, hook: str, payload: str) -> str:
    if change.owner == "hook":
        return hook
    return size(len(change.content)) if change.content is not None else payload


def match_text(match: str, release: str, version: str | None) -> str:
    """How well the target's vLLM is known."""
    if match == "supported":
        return f"supported (vLLM {release})"
    if match == "partial":
        return f"partial: not every symbol that matters is as in vLLM {release}; only the ops that fit are installed"
    return f"compatible: every symbol that matters is as in vLLM {release}; {version or 'this version'} was not tested"


def recover(target: Path, state_dir: Path, out: Output) -> str | None:
    """Finishes or undoes an interrupted transaction and says so; the caller holds the lock.

    Args:
        target: the folder that contains `vllm`.

    Returns:
        What was said, None when there was nothing to recover.
    """
    from deepinfer_cli.overlay.recovery import recover as recover_transaction

    report = recover_transaction(target, state_dir)
    if report.outcome == "nothing":
        return None
    sentence = f"an interrupted {report.kind} was found and {report.outcome}"
    out.warn(sentence)
    for path in report.foreign:
        out.warn(f"{path} was changed by someone else since, and was left as it is")
    for path in report.copies:
        out.warn(f"a copy was kept: {path}")
    return sentence


def say_restart(root: Path, out: Output) -> list[int]:
    """Names the processes that still run the old code, and returns their ids."""
    from deepinfer_cli.detect.process import running

    processes = running(root)
    if processes:
        out.line(f"restart vLLM: process {joined(str(one.pid) for one in processes)} still runs the old code")
    return [one.pid for one in processes]
