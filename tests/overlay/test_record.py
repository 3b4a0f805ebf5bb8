from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay.finish import put_record
from deepinfer_cli.overlay.record import FileEntry, Record, RecordTarget, encode, read_record

RECORD = Record(
    deepinfer_version="0.1.0",
    overlay_version="0.1.0",
    payload_digest="d" * 64,
    transaction_id="0123456789ab",
    created_at="2026-01-01T00:00:00+00:00",
    target=RecordTarget("/site/vllm", "environment", "0.33.0", "deepseek_v41"),
    release="0.33.0",
    match="supported",
    ops=("gather", "combine"),
    skip=(),
    arch=("sm80", "sm86"),
    files=(
        FileEntry("vllm/deepinfer_sm80/é.py", "payload", None, "a" * 64),
        FileEntry("vllm/x.py", "hook", "b" * 64, "c" * 64, "backups/01/vllm/x.py", 0o640, 1000, 1000),
    ),
    created_dirs=("vllm/deepinfer_sm80",),
)


def _change(state_dir: Path, **values: object) -> None:
    path = state_dir / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_round_trip(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    put_record(tmp_path, encode(RECORD))
    assert read_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_overwriting_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_record(tmp_path, encode(RECORD))

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError):
        put_record(tmp_path, encode(replace(RECORD, overlay_version="0.2.0")))
    assert read_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_fields_of_a_newer_deepinfer_are_ignored(tmp_path: Path) -> None:
    put_record(tmp_path, encode(RECORD))
    _change(tmp_path, news=1, target={"root": "/site/vllm", "kind": "tree", "extra": 1})
    found = read_record(tmp_path)
    assert found is not None and found.target.kind == "tree"


def test_newer_schema_names_both(tmp_path: Path) -> None:
    put_record(tmp_path, encode(RECORD))
    _change(tmp_path, schema_version=2)
    with pytest.raises(FailedError, match=r"schema 2.*up to 1") as caught:
        read_record(tmp_path)
    assert caught.value.code == "record-too-new"
    assert caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema_version": "1"}',
        '{"schema_version": 1, "files": 3, "target": {}}',
        "\udcff",
    ],
)
def test_unreadable_record_says_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "record.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(FailedError) as caught:
        read_record(tmp_path)
    assert caught.value.code == "record-unreadable"
    assert caught.value.paths == (str(tmp_path / "record.json"),)
    assert "deepinfer rollback" in (caught.value.hint or "")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.py", "vllm/../../x.py"])
def test_paths_that_lead_outside_are_refused(tmp_path: Path, path: str) -> None:
    put_record(tmp_path, encode(RECORD))
    for entry in ({"path": path}, {"backup": path}):
        files = [
            {"path": "vllm/x.py", "owner": "hook", "original_sha256": "b", "applied_sha256": "c"} | entry
        ]
        _change(tmp_path, files=files)
        with pytest.raises(FailedError):
            read_record(tmp_path)
