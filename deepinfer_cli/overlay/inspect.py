"""What an install looks like on disk now, as a whole. Reads, never writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer_cli.detect.vllm import Target, TargetKind
from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay import journal as journals
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.files import hash_of
from deepinfer_cli.overlay.journal import Operation
from deepinfer_cli.overlay.payload import PAYLOAD_DIR, Payload
from deepinfer_cli.overlay.record import FileEntry, Record, read_record
from deepinfer_cli.overlay.site import (
    FileState,
    FileStatus,
    Site,
    extra_files,
    file_state,
    hooked_files,
    unhooked,
)

# hooks are at the end of a file; a status need not read fifty megabytes
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Inspection:
    """A whole target.

    Attributes:
        state: `not-installed`, `installed`, `unrecorded`, `modified`, `stale`, `interrupted` or `leftover`.
        journal: an install or rollback was interrupted.
        skip: ops left to stock.
        payload_digest: of the payload on disk, None without one.
    """

    state: str
    files: tuple[FileStatus, ...] = ()
    record: Record | None = None
    journal: bool = False
    skip: tuple[str, ...] = ()
    overlay_version: str | None = None
    payload_digest: str | None = None
    notes: tuple[str, ...] = ()


def inspect(target: Target) -> Inspection:
    """The state of `target`, by its record where there is one, else by what lies on disk.

    Raises:
        FailedError: the record cannot be read.
    """
    site = Site.of(target)
    unfinished = Unfinished.of(site)
    record = read_record(site.state_dir)
    found = _recorded(site, record, unfinished) if record else _unrecorded(site, unfinished)
    if unfinished is None:
        return found
    note = f"{unfinished.kind} was interrupted; `deepinfer install` and `deepinfer rollback` recover first"
    files = tuple(unfinished.judge(site, each) for each in found.files)
    return replace(found, state="interrupted", files=files, journal=True, notes=(*found.notes, note))


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an interrupted install or rollback was about to do.

    Attributes:
        kind: which of the two, for people.
        operations: by path; empty where the journal cannot be read.
    """

    kind: str
    operations: dict[str, Operation]

    @classmethod
    def of(cls, site: Site) -> Unfinished | None:
        """That of a site, None where nothing is unfinished."""
        try:
            journal = journals.pending(site.state_dir)
        except FailedError:
            return cls("an install or rollback", {})
        if journal is None:
            return None
        article = "an" if journal.kind == "install" else "a"
        return cls(f"{article} {journal.kind}", {item.path: item for item in journal.operations})

    def wrote(self, path: str) -> bool:
        """Whether a file is one that it staged or put there."""
        return path in self.operations or journals.is_temp(path)

    def judge(self, site: Site, file: FileStatus) -> FileStatus:
        """A file that is as the transaction found, or made, it was edited by nobody else."""
        item = self.operations.get(file.path)
        if item is None or file.state not in (FileState.MODIFIED, FileState.MISSING):
            return file
        if hash_of(site.parent / file.path) in (item.before_sha256, item.via_sha256, item.after_sha256):
            return replace(file, note=f"{self.kind} got this far")
        return file


def _recorded(site: Site, record: Record, unfinished: Unfinished | None) -> Inspection:
    files = []
    for entry in record.files:
        state, note = file_state(entry, site, record)
        files.append(FileStatus(entry.path, entry.owner, state, note))
    extra = _not_ours(extra_files(site, {entry.path for entry in record.files}), unfinished)
    notes = [f"{path} is not DeepInfer's" for path in extra]
    notes += [
        f"the backup of {entry.path} is missing or damaged: rollback needs it once that file was edited or is gone"
        for entry in record.files
        if entry.backup and hash_of(site.state_dir / entry.backup) != entry.original_sha256
    ]
    notes += [
        f"{entry.path} had edits before the install: rollback gives it back with them"
        for entry in record.files
        if (record.kept or record.adopted) and _was_edited(entry, site, record)
    ]
    if site.version != record.target.version:
        notes.append(f"installed into vLLM {record.target.version}, found {site.version}")
    digest = record.payload_digest
    if any(each.owner == "payload" and each.state is not FileState.APPLIED for each in files):
        digest = _digest(site) or ""
    return Inspection(
        _overall(site, record, files),
        tuple(files),
        record,
        skip=record.skip,
        overlay_version=record.overlay_version,
        payload_digest=digest or None,
        notes=tuple(notes),
    )


def _was_edited(entry: FileEntry, site: Site, record: Record) -> bool:
    """Whether `install --force` accepted a file that is not vLLM's own."""
    if entry.owner == "payload" or site.moved(record):
        return False
    return _cheap_origin(site, entry.path) not in (None, entry.original_sha256)


def _overall(site: Site, record: Record, files: list[FileStatus]) -> str:
    if site.leftover:
        return "leftover"
    states = {each.state for each in files}
    gone = {each.state for each in files if each.owner == "hook"} & {FileState.PRISTINE, FileState.STALE}
    if FileState.MODIFIED in states:
        return "modified"
    if gone or (site.moved(record) and states != {FileState.APPLIED}):
        return "stale"
    return "modified" if FileState.MISSING in states else "installed"


def _not_ours(paths: tuple[str, ...], unfinished: Unfinished | None) -> tuple[str, ...]:
    return paths if unfinished is None else tuple(path for path in paths if not unfinished.wrote(path))


def _unrecorded(site: Site, unfinished: Unfinished | None) -> Inspection:
    hooks = {
        path: (site.parent / path).read_bytes()
        for path, _ in hooked_files(site.parent, tail_bytes=_TAIL_BYTES)
    }
    present = extra_files(site, set())
    if not hooks and not present:
        return Inspection("not-installed")
    bundled = payloads.bundled()
    files: list[FileStatus] = []
    foreign = present
    if has_ours(present, bundled):
        files, foreign = _unrecorded_payload(site, present, bundled)
    elif not hooks:
        foreign = _not_ours(foreign, unfinished)
        return Inspection("not-installed", notes=tuple(f"{path} is not DeepInfer's" for path in foreign))
    state, note = "unrecorded", "no record: it came by `git apply` or `cp -r`, or its state folder was lost"
    if site.leftover:
        state, note = "leftover", "vLLM was uninstalled: `deepinfer rollback` removes what is left"
    elif not hooks:
        note = "the overlay's package is there, but no file of vLLM is hooked"
    elif not files:
        state = "modified"
        note = "vLLM's files are hooked, but the overlay's package is missing: they cannot be imported"
    files += [_unrecorded_hook(site, path, content) for path, content in hooks.items()]
    if state == "unrecorded" and any(each.state is not FileState.APPLIED for each in files):
        state = "modified"
    found = payloads.load(site.parent / PAYLOAD_DIR)
    # how it came there is known, then
    notes = (note,) if unfinished is None else ()
    return Inspection(
        state,
        tuple(files),
        skip=tuple(sorted({name for content in hooks.values() for name in hook.skipped(content)})),
        overlay_version=found.version,
        payload_digest=found.digest if present else None,
        notes=(*notes, *(f"{path} is not DeepInfer's" for path in _not_ours(foreign, unfinished))),
    )


def has_ours(present: tuple[str, ...], bundled: Payload) -> bool:
    """Whether one of the files in the payload's folder has the name of one of ours: else the folder is a user's."""
    return any(path.removeprefix(f"{PAYLOAD_DIR}/") in bundled.files for path in present)


def _unrecorded_payload(
    site: Site, present: tuple[str, ...], bundled: Payload
) -> tuple[list[FileStatus], tuple[str, ...]]:
    """The payload's files compared with the bundled ones, and the files there that are not ours."""
    found = payloads.load(site.parent / PAYLOAD_DIR)
    if found.version not in (None, bundled.version):
        # nothing here knows what another version's files are
        return [FileStatus(path, "payload", FileState.APPLIED, "not checked") for path in present], ()
    files = []
    for name, wanted in bundled.files.items():
        path = f"{PAYLOAD_DIR}/{name}"
        state, note = FileState.APPLIED, ""
        if path not in present:
            state, note = FileState.MISSING, f"overlay {bundled.version} has it"
        elif found.files.get(name) != wanted or (site.parent / path).is_symlink():
            state, note = FileState.MODIFIED, f"not as in overlay {bundled.version}"
        files.append(FileStatus(path, "payload", state, note))
    return files, tuple(path for path in present if path.removeprefix(f"{PAYLOAD_DIR}/") not in bundled.files)


def _unrecorded_hook(site: Site, path: str, content: bytes) -> FileStatus:
    if not content.endswith(hook.block(hook.skipped(content))):
        return FileStatus(path, "hook", FileState.MODIFIED, "our block was edited, or is not at the end")
    origin = _cheap_origin(site, path)
    if origin is not None and unhooked(content, {origin}) is None:
        return FileStatus(path, "hook", FileState.MODIFIED, "besides our block it is not vLLM's own content")
    return FileStatus(path, "hook", FileState.APPLIED)


def _cheap_origin(site: Site, path: str) -> str | None:
    """The pristine hash, None also where asking for it takes git."""
    if site.target is not None and site.target.kind is TargetKind.CHECKOUT:
        return None
    return site.origin(path)


def _digest(site: Site) -> str | None:
    folder = site.parent / PAYLOAD_DIR
    return payloads.load(folder).digest if folder.is_dir() else None
