"""After a killed install or rollback: finish it when every file has its new content, else undo it.

The next command that may write calls `recover` first, under the lock. Both kinds are handled alike: an interrupted
install ends as pristine (or as the earlier overlay) or as installed; an interrupted rollback as applied or as
pristine. `undo` says what happens to files that someone changed meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer_cli.overlay import record as records
from deepinfer_cli.overlay import undo as undoing
from deepinfer_cli.overlay.files import hash_of
from deepinfer_cli.overlay.finish import clean, finish_steps
from deepinfer_cli.overlay.journal import Journal, pending
from deepinfer_cli.overlay.signals import shielded
from deepinfer_cli.overlay.state import write_error
from deepinfer_cli.overlay.undo import RecoveryReport

__all__ = ["RecoveryReport", "pending", "recover"]


def recover(parent: Path, state_dir: Path) -> RecoveryReport:
    """Bring an interrupted install or rollback to its end or back to its start; the caller holds the lock.

    Args:
        parent: the folder that contains `vllm`.
        state_dir: the state folder of that vLLM.

    Raises:
        FailedError: a file could not be restored (`restore-failed`), or the journal cannot be read.
        UnsupportedError: the target cannot be written (`read-only`).
    """
    try:
        with shielded():
            report = _recover(parent, state_dir)
    except OSError as error:
        raise write_error(error, Path(error.filename or state_dir)) from error
    if report.failed:
        raise report.error()
    return report


def _recover(parent: Path, state_dir: Path) -> RecoveryReport:
    journal = pending(state_dir)
    if journal is None:
        clean(state_dir)
        return RecoveryReport()
    if not _is_done(journal, parent, state_dir):
        return undoing.undo(journal, parent, state_dir)
    for name, action in finish_steps(journal, parent, state_dir):
        undoing._step(name)
        action()
    return RecoveryReport("finished", journal.kind)


def _is_done(journal: Journal, parent: Path, state_dir: Path) -> bool:
    if any(hash_of(parent / item.path) != item.after_sha256 for item in journal.operations):
        return False
    record = records.decode(journal.record_after) if journal.record_after else None
    entries = record.files if record else ()
    return all(hash_of(state_dir / each.backup) == each.original_sha256 for each in entries if each.backup)
