"""`record.json`: what is installed in one target, and all that rollback needs to take it back.

Schema 1: the fields of `Record` as one JSON object, `files` a list of `FileEntry` objects, in the order in which an
install writes them (payload first, hooks last). Paths are posix: of files relative to the parent of `vllm`, of
backups relative to the state folder. Unknown fields are ignored, so a newer DeepInfer may add some.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay.files import read

SCHEMA_VERSION = 1
NAME = "record.json"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file that an install wrote.

    Attributes:
        path: posix, relative to the parent of `vllm`.
        owner: `payload` or `hook`.
        original_sha256: hash before the first install, None when the file did not exist.
        applied_sha256: hash that the install gave it.
        backup: where the original is, relative to the state folder; None without an original.
        mode, uid, gid: the original's; None without one.
    """

    path: str
    owner: str
    original_sha256: str | None
    applied_sha256: str
    backup: str | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class RecordTarget:
    """The vLLM that was installed into."""

    root: str
    kind: str
    version: str | None = None
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One install.

    Attributes:
        created_at: UTC, ISO 8601.
        release: the release whose fingerprints held; with `partial` the nearest one.
        match: `supported`, `compatible` or `partial`.
        ops: installed ops; `skip` those left to stock.
        arch: architectures it was installed for, such as `sm80`.
        created_dirs: folders that were made, parents first.
        adopted: files were in place before without a record.
        kept: copies of files a user had changed, absolute, made by `--force`.
    """

    deepinfer_version: str
    overlay_version: str
    payload_digest: str
    transaction_id: str
    created_at: str
    target: RecordTarget
    release: str
    match: str
    ops: tuple[str, ...]
    skip: tuple[str, ...]
    arch: tuple[str, ...]
    files: tuple[FileEntry, ...]
    created_dirs: tuple[str, ...] = ()
    adopted: bool = False
    kept: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def entry(self, path: str) -> FileEntry | None:
        """The entry of one file."""
        return next((entry for entry in self.files if entry.path == path), None)


def to_json(value: Any) -> bytes:
    """`value` as the JSON text of record and journal."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def encode(record: Record) -> dict[str, Any]:
    """`record` as JSON-ready data."""
    return asdict(record)


def known_fields(kind: type[_T], data: dict[str, Any]) -> dict[str, Any]:
    """The items of `data` that `kind` has; lists become tuples."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]  # a dataclass, by use
    pairs = ((key, value) for key, value in data.items() if key in names)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in pairs}


def decode(data: dict[str, Any]) -> Record:
    """The record in JSON data.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    values = known_fields(Record, data)
    values["target"] = RecordTarget(**known_fields(RecordTarget, data["target"]))
    values["files"] = tuple(FileEntry(**known_fields(FileEntry, item)) for item in data["files"])
    for entry in values["files"]:
        check_path(entry.path)
        check_path(entry.backup or "backups")
    for folder in values.get("created_dirs", ()):
        check_path(folder)
    return Record(**values)


def check_path(path: str) -> None:
    """Refuse a path that leads outside.

    Raises:
        ValueError: absolute, or with `..`.
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} leads outside")


def read_record(state_dir: Path) -> Record | None:
    """The record in `state_dir`, None without one.

    Raises:
        FailedError: it cannot be read, or a newer DeepInfer wrote it in another schema.
    """
    path = state_dir / NAME
    content = read(path)
    if content is None:
        return None
    return parse(content, path)


def parse(content: bytes, path: Path) -> Record:
    """The record in `content`, which was read from `path`.

    Raises:
        FailedError: as `read_record`.
    """
    try:
        data = json.loads(content)
        check_schema(data["schema_version"], path)
        return decode(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FailedError(
            f"the record of this install cannot be read ({error!r})",
            code="record-unreadable",
            hint="delete this file and run `deepinfer rollback`, which then goes by the files themselves; if that "
            f"refuses, {STOCK_AGAIN}",
            paths=(path,),
        ) from error


# one sentence for every kind of target: where it is said, no target is known
STOCK_AGAIN = (
    "put back vLLM's own files: those of its wheel, or git's in a checkout; pip's --force-reinstall --no-deps does it "
    "when the pip is that environment's own"
)


def check_schema(version: Any, path: Path) -> None:
    """Refuse a newer schema.

    Raises:
        FailedError: a newer DeepInfer wrote `path`.
    """
    if not isinstance(version, int):
        raise TypeError(f"schema_version is {version!r}")
    if version > SCHEMA_VERSION:
        raise FailedError(
            f"{path.name} has schema {version}; this DeepInfer reads up to {SCHEMA_VERSION}",
            code="record-too-new",
            hint="use the DeepInfer that installed the overlay, or a newer one",
            paths=(path,),
        )
