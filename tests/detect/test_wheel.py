"""Fetching and unpacking wheels; the real download is what the release fixtures do."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from deepinfer_cli.detect import wheel
from deepinfer_cli.errors import FailedError, RefusedError, UnsupportedError, UsageError

FILES = {
    "vllm/__init__.py": b"X = 1\n",
    "vllm/_C.abi3.so": b"\x7fELF",
    "vllm/models/a.py": b"# \xc3\xa9\n",
    "vllm-0.33.0.dist-info/METADATA": b"Name: vllm\nVersion: 0.33.0\n",
    "vllm-0.33.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-manylinux_2_28_x86_64\n",
}


def build(folder: Path, *, damaged: str | None = None, extra: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (FILES | (extra or {})).items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
            archive.writestr(name, data + (b"#" if name == damaged else b""))
        archive.writestr(
            "vllm-0.33.0.dist-info/RECORD", "\n".join([*rows, "vllm-0.33.0.dist-info/RECORD,,"]) + "\n"
        )
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepinfer" / "wheels"


@pytest.fixture
def index(tmp_path, monkeypatch, cache):
    """pip that finds nothing but the wheels in a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


def test_python_files_and_metadata_are_unpacked(tmp_path):
    wheel.unpack(build(tmp_path), tmp_path / "out")
    found = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {*FILES, "vllm-0.33.0.dist-info/RECORD"} - {"vllm/_C.abi3.so"}
    assert (tmp_path / "out/vllm/models/a.py").read_bytes() == FILES["vllm/models/a.py"]
    assert wheel.changed_files(tmp_path / "out") == ()
    (tmp_path / "out/vllm/models/a.py").write_bytes(b"")
    assert wheel.changed_files(tmp_path / "out") == ("vllm/models/a.py",)


@pytest.mark.parametrize("options", [{"damaged": "vllm/models/a.py"}, {"extra": {"../evil.py": b""}}])
def test_a_damaged_wheel_leaves_nothing(tmp_path, options):
    path = build(tmp_path / "wheels", **options)
    with pytest.raises(FailedError) as caught:
        wheel.unpack(path, tmp_path / "out")
    assert caught.value.code == "wheel-damaged"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["wheels"]


def test_no_wheel_at_all_is_damaged_too(tmp_path):
    path = tmp_path / "vllm.whl"
    path.write_bytes(b"<html>")
    with pytest.raises(FailedError):
        wheel.unpack(path, tmp_path / "out")


def test_fetch_downloads_once_and_copies(tmp_path, index, cache):
    build(index)
    said: list[str] = []
    tree = wheel.fetch_tree("0.33.0", tmp_path / "a tree", on_progress=said.append)
    assert tree == tmp_path / "a tree" / "vllm"
    assert (tree / "__init__.py").read_bytes() == FILES["vllm/__init__.py"]
    assert [text.split()[0] for text in said] == ["downloading", "unpacking"]
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["0.33.0"], (
        "the wheel itself is not kept"
    )
    (index / next(index.iterdir()).name).unlink()
    (tmp_path / "empty").mkdir()
    second = wheel.fetch_tree("0.33.0", tmp_path / "empty", on_progress=said.append)
    assert len(said) == 2
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["vllm", "vllm-0.33.0.dist-info"]
    (second / "__init__.py").write_bytes(b"mine")
    assert (wheel.cached_tree("0.33.0") / "__init__.py").read_bytes() == FILES["vllm/__init__.py"]
    with pytest.raises(FailedError):
        wheel.fetch_tree("0.33.0", tmp_path / "fresh", reuse_cache=False)
    assert (wheel.cached_tree("0.33.0") / "__init__.py").exists(), "a failed refresh keeps what there was"


def test_two_at_once_download_once(index, cache):
    build(index)
    said: list[str] = []
    threads = [
        threading.Thread(target=wheel.cached_tree, args=("0.33.0",), kwargs={"on_progress": said.append})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2


def test_a_folder_with_content_is_refused_before_any_download(tmp_path, cache):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for into in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(RefusedError) as caught:
            wheel.fetch_tree("0.33.0", into)
        assert caught.value.code == "into-not-empty"
    assert not cache.exists()


def test_no_such_version(index):
    build(index)
    with pytest.raises(UnsupportedError) as caught:
        wheel.cached_tree("0.1.77")
    assert "0.1.77" in caught.value.message


@pytest.mark.parametrize("version", ["", "../x", "-r", "0.33.0; x", "latest"])
def test_what_is_no_version_never_reaches_pip(cache, version):
    with pytest.raises(UsageError):
        wheel.cached_tree(version)


def test_no_network(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(FailedError) as caught:
        wheel.cached_tree("0.33.0")
    assert caught.value.code == "download-failed"
    assert "network" in (caught.value.hint or "")


def test_no_pip(index, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedError) as caught:
        wheel.cached_tree("0.33.0")
    assert caught.value.code == "pip-missing"
    assert sys.executable in caught.value.message


def test_where_nothing_can_be_written(tmp_path, index, cache):
    build(index)
    wheel.cached_tree("0.33.0")
    (tmp_path / "file").touch()
    with pytest.raises(FailedError) as caught:
        wheel.fetch_tree("0.33.0", tmp_path / "file" / "below")
    assert caught.value.code == "write-failed"
    assert str(tmp_path / "file") in caught.value.paths[0]


def test_what_a_killed_download_left_goes_with_the_next(index, cache):
    build(index)
    left = cache / ".download-0.33.0-abcd1234"
    other = cache / ".download-0.32.0-abcd1234"
    for folder in (left, other):
        folder.mkdir(parents=True)
    wheel.cached_tree("0.33.0")
    assert (left.exists(), other.exists()) == (False, True)


def test_a_download_on_a_full_disk_is_no_question_of_the_network(index, cache, monkeypatch):
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    done = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(wheel.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(FailedError) as caught:
        wheel.cached_tree("0.33.0")
    assert caught.value.code == "no-space"
