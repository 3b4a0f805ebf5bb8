"""What tests of plans share."""

from __future__ import annotations

from deepinfer_cli.overlay.record import FileEntry, Record, RecordTarget

HOOKED = "vllm/models/deepseek_v41/common/ops/cache_utils.py"
ROCM_PATH = "vllm/models/deepseek_v41/amd/rocm.py"


def carry_out(plan):
    """Write a plan's files, nothing else: what `git apply` or `cp -r` of it leaves."""
    for change in plan.writes:
        path = plan.target.path(change.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if change.content is not None:
            path.write_bytes(change.content)


def record_of(plan) -> Record:
    """The record an install of `plan` leaves, as far as plans read it."""
    files = tuple(
        FileEntry(
            path=change.path,
            owner=change.owner,
            original_sha256=change.pristine_sha256,
            applied_sha256=change.after_sha256,
        )
        for change in plan.changes
        if change.after_sha256
    )
    target = plan.target
    return Record(
        deepinfer_version="0.1.0",
        overlay_version=plan.overlay_version,
        payload_digest=plan.payload_digest,
        transaction_id="t",
        created_at="2026-01-01T00:00:00+00:00",
        target=RecordTarget(str(target.root), target.kind.value, target.version, target.layout),
        release=plan.release,
        match=plan.match,
        ops=tuple(op.name for op in plan.ops if op.installed),
        skip=plan.skip,
        arch=("sm80",),
        files=files,
    )


def by_path(plan):
    return {change.path: change for change in plan.changes}


def change_symbol(fake, old: bytes, new: bytes) -> None:
    path = fake.cache_utils
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    fake.reinstall_record()
