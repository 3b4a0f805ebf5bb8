"""The maintainers' scripts: a release is added in one command, patches are checked."""

from __future__ import annotations

import re
import shutil

import pytest

from deepinfer_cli.overlay import payload
from scripts import add_release, make_patches

pytestmark = pytest.mark.release


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The manifest of a copy of the payload, which the scripts then work on."""
    root = tmp_path / "deepinfer_sm80"
    shutil.copytree(payload.bundled().root, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(payload, "bundled", lambda: payload.load(root))
    return root / "manifest.toml"


def test_a_release_is_added_in_one_command(text, pristine_release, capsys):
    pristine_release("0.33.0")
    full = text.read_text(encoding="utf-8")
    text.write_text(full[: full.index('[releases."0.33.0".files]')], encoding="utf-8")
    assert add_release.main(["0.33.0", "--check"]) == 1
    assert add_release.main(["0.33.0"]) == 0
    assert text.read_text(encoding="utf-8") == full
    assert "0.33.0" in capsys.readouterr().out


def test_what_a_new_symbol_lacks_is_filled_in(text, pristine_release):
    pristine_release("0.31.0")
    full = text.read_text(encoding="utf-8")
    start = full.index('[releases."0.31.0".fingerprints]')
    text.write_text(
        full[:start] + re.sub(r'(?m)^"[^"]+V4_BYTES_PER_TOKEN" = .*\n', "", full[start:], count=1),
        encoding="utf-8",
    )
    assert text.read_text(encoding="utf-8") != full
    assert add_release.main([]) == 0
    assert text.read_text(encoding="utf-8") == full


def test_patches_are_written_and_checked(tmp_path, monkeypatch, pristine_release, capsys):
    monkeypatch.setattr(make_patches, "PATCHES", tmp_path / "patches")
    assert make_patches.main(["--check"]) == 1
    assert "0.30.0/vllm-sm80-deepinfer.patch: not current" in capsys.readouterr().out
    assert make_patches.main([]) == 0
    first = {path: path.read_bytes() for path in (tmp_path / "patches").rglob("*.patch")}
    assert len(first) == 4
    assert make_patches.main(["--check"]) == 0
    next(iter(first)).write_bytes(b"")
    assert make_patches.main(["--check"]) == 1
