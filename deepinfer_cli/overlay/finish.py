"""The end of a transaction: folders that go, the record, the commit, and backups that nobody needs any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepinfer_cli.overlay import journal as journals
from deepinfer_cli.overlay import record as records
from deepinfer_cli.overlay.files import (
    existing_ancestor,
    read,
    remove_dir,
    remove_empty_package,
    remove_tree,
    sync_dir,
    unlink_quietly,
    write_atomically,
)
from deepinfer_cli.overlay.journal import USES, Journal

Step = tuple[str, Callable[[], None]]


def finish_steps(journal: Journal, parent: Path, state_dir: Path) -> list[Step]:
    """The last steps of a transaction, once every file has its new content; the last but one is the commit."""

    def drop_dirs() -> None:
        drop_temps(journal, parent)
        for folder in reversed(journal.dropped_dirs):
            remove_empty_package(parent / folder)

    def commit() -> None:
        (state_dir / journals.NAME).unlink()
        sync_dir(state_dir)

    return [
        ("folders", drop_dirs),
        ("record", lambda: put_record(state_dir, journal.record_after)),
        ("commit", commit),
        ("clean", lambda: clean(state_dir)),
    ]


def drop_temps(journal: Journal, parent: Path) -> None:
    """Delete what was staged beside the targets."""
    for item in journal.operations:
        for use in USES:
            unlink_quietly(journal.temp(parent, item.path, use))


def put_record(state_dir: Path, data: dict[str, object] | None) -> None:
    """Write the record, or delete it; nothing when it is as it should be."""
    path = state_dir / records.NAME
    if data is None:
        path.unlink(missing_ok=True)
    elif read(path) != records.to_json(data):
        write_atomically(path, records.to_json(data))


def clean(state_dir: Path) -> None:
    """Delete backups that no record names, and the folder when it is empty; not while there is a journal."""
    if not state_dir.is_dir() or (state_dir / journals.NAME).exists():
        return
    record = records.read_record(state_dir)
    for name in (records.NAME, journals.NAME):
        (state_dir / f"{name}.tmp").unlink(missing_ok=True)
    remove_tree(
        state_dir / "backups",
        keep=[state_dir / entry.backup for entry in (record.files if record else ()) if entry.backup],
    )
    remove_dir(state_dir)
    sync_dir(existing_ancestor(state_dir))
