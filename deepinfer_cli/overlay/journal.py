"""`journal.json`: one unfinished install or rollback, written before anything else and deleted last.

Schema 1 is `Journal` as one JSON object:

    kind            `install` or `rollback`
    transaction_id  also names the temp files (`.<name>.<id>.<use>.deepinfer-tmp`, beside each target) and `backups/<id>/`
    operations      every file that changes, in order: path, owner, the hash before and after (null: no such file),
                    and the backup of the bytes before, relative to the state folder. `via_sha256` is the hash without
                    our block, where a hooked file goes through it: while an overlay is replaced by another, its
                    files do not match each other, and no module may import them
    made_dirs       folders this transaction makes, parents first
    dropped_dirs    folders that go with their last file, parents first
    copies          files whose content a user changed and that are replaced: path → the copy that is kept of it
    kept_dir        the folder of such copies; both relative to the parent of `vllm`
    record_before   the record before and after, as in `record.json` (null: none)
    record_after

There is no phase: recovery goes by what is on disk. A file with the hash `before` was not reached or is restored, one
with `after` is done, any other was changed by someone else since. All done (and the new record's backups whole) means
finish; anything else means undo.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay.files import read, write_atomically
from deepinfer_cli.overlay.record import STOCK_AGAIN, check_path, check_schema, known_fields, to_json

NAME = "journal.json"
USES = ("new", "via", "undo")
_TEMP = ".deepinfer-tmp"


@dataclass(frozen=True, slots=True)
class Operation:
    """One file of a transaction."""

    path: str
    owner: str
    before_sha256: str | None
    after_sha256: str | None
    backup: str | None = None
    via_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Journal:
    """One transaction; the module's docstring says what each field is."""

    kind: str
    transaction_id: str
    created_at: str
    operations: tuple[Operation, ...]
    made_dirs: tuple[str, ...]
    dropped_dirs: tuple[str, ...]
    copies: dict[str, str]
    kept_dir: str
    record_before: dict[str, Any] | None
    record_after: dict[str, Any] | None
    schema_version: int = 1

    def temp(self, parent: Path, path: str, use: str = "new") -> Path:
        """The staged file for `path`; `use` is one of `USES`."""
        target = parent / path
        return target.with_name(f".{target.name}.{self.transaction_id}.{use}{_TEMP}")


def is_temp(path: str) -> bool:
    """Whether a file is one that some transaction staged."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(_TEMP)


def write_journal(state_dir: Path, journal: Journal) -> None:
    """Write and flush the journal; from here on the payload refuses to serve."""
    write_atomically(state_dir / NAME, to_json(asdict(journal)))


def pending(state_dir: Path) -> Journal | None:
    """The journal of an unfinished install or rollback, None without one.

    Raises:
        FailedError: it cannot be read, or a newer DeepInfer wrote it.
    """
    path = state_dir / NAME
    content = read(path)
    if content is None:
        return None
    try:
        data = json.loads(content)
        check_schema(data["schema_version"], path)
        return _decode(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FailedError(
            f"the journal of an unfinished install or rollback cannot be read ({error!r})",
            code="journal-unreadable",
            hint=f"the originals are in {state_dir / 'backups'}: put them back, or {STOCK_AGAIN}; then delete this "
            "file and run `deepinfer rollback`",
            paths=(path,),
        ) from error


def _decode(data: dict[str, Any]) -> Journal:
    values = known_fields(Journal, data)
    values["operations"] = tuple(Operation(**known_fields(Operation, item)) for item in data["operations"])
    for each in values["operations"]:
        check_path(each.path)
        check_path(each.backup or "backups")
    for path in (
        *values["made_dirs"],
        *values["dropped_dirs"],
        *values["copies"].values(),
        values["kept_dir"],
        values["transaction_id"],
    ):
        check_path(path)
    return Journal(**values)
