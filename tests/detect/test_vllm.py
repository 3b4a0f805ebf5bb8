"""Finding vLLM by path and by interpreter."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from shlex import quote

import pytest

from deepinfer_cli.detect.vllm import Origin, TargetKind, find_leftover, find_target
from deepinfer_cli.errors import UnsupportedError
from tests.conftest import git, write_dist_info


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An empty venv's interpreter, in a folder with a space and a non-ASCII letter."""
    folder = tmp_path_factory.mktemp("envs") / "my vénv"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture
def site(python) -> Path:
    """That venv's site-packages, emptied afterwards."""
    path = next(python.parent.parent.glob("lib/python*/site-packages"))
    before = set(path.iterdir())
    yield path
    for item in set(path.iterdir()) - before:
        subprocess.run(["rm", "-rf", str(item)], check=True)


@pytest.mark.parametrize("part", [".", "vllm"])
def test_target_takes_the_parent_or_the_package(fake_vllm, part):
    fake = fake_vllm()
    found = find_target(target=fake.site / part)
    assert (found.kind, found.root, found.version) == (TargetKind.ENVIRONMENT, fake.root.resolve(), "0.33.0")
    assert (found.layout, found.git_dir, found.python) == ("deepseek_v41", None, None)
    assert found.state_dir == fake.site.resolve() / ".deepinfer"
    assert "--target" in found.reason


def test_a_relative_or_linked_target_is_resolved_once(fake_vllm, tmp_path, monkeypatch):
    fake = fake_vllm(tmp_path / "trée one")
    (tmp_path / "link").symlink_to(fake.root)
    monkeypatch.chdir(tmp_path)
    for given in (Path("trée one"), Path("link"), Path("trée one/vllm")):
        found = find_target(target=given)
        assert (found.root, found.kind) == (fake.root.resolve(), TargetKind.TREE)


def test_a_checkout_keeps_its_state_in_its_git_folder(fake_vllm, tmp_path):
    fake = fake_vllm(tmp_path / "vllm", checkout=True)
    found = find_target(target=tmp_path / "vllm")
    assert (found.kind, found.root) == (TargetKind.CHECKOUT, (tmp_path / "vllm" / "vllm").resolve())
    assert found.state_dir == fake.site.resolve() / ".git" / "deepinfer"
    assert (found.version, "checkout" in found.reason) == ("0.33.0", True)
    origin = Origin.of(found)
    path = fake.cache_utils.relative_to(fake.site).as_posix()
    assert (origin.source, origin.sha256(path), origin.sha256("vllm/none.py")) == (
        "HEAD",
        sha256(fake.cache_utils),
        None,
    )


def test_a_linked_work_tree_has_its_own_state(fake_vllm, tmp_path):
    fake = fake_vllm(tmp_path / "main", checkout=True)
    git(fake.site, "worktree", "add", "-q", "../second")
    found = find_target(target=tmp_path / "second")
    expected = git(tmp_path / "second", "rev-parse", "--git-path", "deepinfer").stdout.strip()
    assert found.kind is TargetKind.CHECKOUT
    assert found.state_dir == (tmp_path / "second" / expected).resolve()
    path = fake.cache_utils.relative_to(fake.site).as_posix()
    assert Origin.of(found).sha256(path) == sha256(fake.cache_utils)


def test_a_git_hooks_environment_does_not_lead_elsewhere(fake_vllm, tmp_path, monkeypatch):
    fake = fake_vllm(tmp_path / "src", checkout=True)
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    path = fake.cache_utils.relative_to(fake.site).as_posix()
    assert Origin.of(find_target(target=fake.site)).sha256(path) == sha256(fake.cache_utils)


def test_a_venv_inside_a_repository_is_no_checkout(fake_vllm, tmp_path):
    git(tmp_path, "init", "-q")
    found = find_target(target=fake_vllm().site)
    assert (found.kind, found.git_dir) == (TargetKind.ENVIRONMENT, None)


def test_a_checkout_without_a_git_binary_is_found_and_its_origin_says_what_is_missing(fake_vllm, tmp_path):
    fake = fake_vllm(tmp_path / "src", checkout=True)
    script = (
        "import sys; from pathlib import Path\n"
        "from deepinfer_cli.detect.vllm import Origin, find_target\n"
        "from deepinfer_cli.errors import FailedError\n"
        "found = find_target(target=Path(sys.argv[1])); print(found.kind.value)\n"
        "try: Origin.of(found).sha256('vllm/__init__.py')\n"
        "except FailedError as error: print(error.code)\n"
    )
    env = {**os.environ, "PATH": str(tmp_path / "nothing")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(fake.site)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["checkout", "git-unavailable"]


@pytest.mark.parametrize("version", ["0.33.1.dev3+g1234", "0.33.0+cu129", "0.34.0rc1"])
def test_any_version_is_read(fake_vllm, version):
    assert find_target(target=fake_vllm(version=version).site).version == version


def test_without_metadata_the_version_is_that_of_the_source(fake_vllm):
    found = find_target(target=fake_vllm(version="0.32.0", dist_info=False).site)
    assert (found.version, found.dist_info) == ("0.32.0", None)
    (found.root / "_version.py").unlink()
    assert find_target(target=found.root).version is None


def test_of_two_metadata_folders_the_one_that_fits_is_taken(fake_vllm):
    fake = fake_vllm()
    write_dist_info(fake.site, "0.9.9")
    assert find_target(target=fake.site).version == "0.33.0"


@pytest.mark.parametrize("layout", ["deepseek_v41", "deepseek_v4_1"])
def test_both_layouts(fake_vllm, layout):
    found = find_target(target=fake_vllm(layout=layout).site)
    assert found.layout == layout
    assert found.module_path("models/{layout}/a.py") == f"vllm/models/{layout}/a.py"


def error_of(**options) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        find_target(**options)
    return caught.value


def test_what_is_no_vllm_is_said_with_what_to_do(tmp_path, python):
    assert error_of(target=tmp_path).code == "vllm-not-found"
    assert "does not exist" in error_of(target=tmp_path / "none").message
    wheel = tmp_path / "vllm-0.33.0.whl"
    wheel.write_bytes(b"")
    assert "--wheel" in (error_of(target=wheel).hint or "")
    venv_error = error_of(target=python.parent.parent)
    assert f"--python {quote(str(python))}" in (venv_error.hint or "")


def test_a_leftover_is_no_vllm(fake_vllm, site, python):
    fake = fake_vllm(site)
    (fake.root / "__init__.py").unlink()
    assert find_leftover(target=site) is None, "not ours"
    (fake.root / "deepinfer_sm80").mkdir()
    for options in ({"target": site}, {"target": fake.root}, {"python": python}):
        error = error_of(**options)
        assert error.code == "vllm-not-found"
        assert error.hint == f"deepinfer rollback --target {quote(str(site.resolve()))}"
        assert find_leftover(**options) == site.resolve()
    (fake.root / "deepinfer_sm80" / "notes.txt").touch()
    assert find_leftover(target=site) is None, "a user's file alone"
    (fake.root / "deepinfer_sm80" / "__init__.py").touch()
    assert find_leftover(target=site) == site.resolve()
    (fake.root / "__init__.py").touch()
    assert find_leftover(target=site) is None


def test_state_without_any_vllm_folder_is_a_leftover(site, python):
    (site / ".deepinfer").mkdir()
    (site / ".deepinfer" / "record.json").write_text("{}")
    assert find_leftover(python=python) == site.resolve()
    assert "rollback" in (error_of(python=python).hint or "")


def test_the_interpreters_vllm(fake_vllm, site, python):
    fake_vllm(site)
    found = find_target(python=python)
    assert (found.kind, found.root, found.python) == (
        TargetKind.ENVIRONMENT,
        (site / "vllm").resolve(),
        python,
    )
    assert (found.version, found.others) == ("0.33.0", ())
    assert str(python) in found.reason


def test_the_folder_one_stands_in_does_not_count(fake_vllm, site, python, tmp_path, monkeypatch):
    monkeypatch.chdir(fake_vllm(tmp_path / "here").site)
    assert error_of(python=python).code == "vllm-not-found"
    fake_vllm(site)
    assert find_target(python=python).root == (site / "vllm").resolve()


def test_pythonpath_shadows_and_both_are_named(fake_vllm, site, python, tmp_path, monkeypatch):
    fake_vllm(site)
    shadow = fake_vllm(tmp_path / "shadow", version="0.30.0")
    monkeypatch.setenv("PYTHONPATH", str(shadow.site))
    found = find_target(python=python)
    assert (found.root, found.version, found.kind) == (shadow.root.resolve(), "0.30.0", TargetKind.TREE)
    assert found.others == ((site / "vllm").resolve(),)
    assert any("PYTHONPATH" in note for note in found.notes)


def test_an_editable_install_leads_to_its_checkout(fake_vllm, site, python, tmp_path):
    fake = fake_vllm(tmp_path / "src", version="0.33.1.dev1+gabc", checkout=True)
    write_dist_info(site, "0.33.1.dev1+gabc", editable=fake.site)
    (site / "__editable__.vllm.pth").write_text(f"{fake.site}\n", encoding="utf-8")
    found = find_target(python=python)
    assert (found.kind, found.root) == (TargetKind.CHECKOUT, fake.root.resolve())
    assert found.dist_info is not None
    assert found.version == "0.33.1.dev1+gabc"
    assert any("editable install" in note for note in found.notes)
    assert Origin.of(found).source == "HEAD"


def test_an_editable_install_by_finder(fake_vllm, site, python, tmp_path):
    fake = fake_vllm(tmp_path / "src", checkout=True)
    (site / "vllm_finder.py").write_text(
        "import importlib.util, sys\nclass F:\n    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n        if name == 'vllm':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(fake.root / '__init__.py')!r},\n"
        f"                submodule_search_locations=[{str(fake.root)!r}])\nsys.meta_path.append(F)\n"
    )
    (site / "vllm.pth").write_text("import vllm_finder\n")
    assert find_target(python=python).root == fake.root.resolve()


def test_a_vllm_in_an_archive_cannot_be_patched(site, python):
    archive = site / "vllm.egg"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("vllm/__init__.py", "")
    (site / "egg.pth").write_text(f"{archive}\n", encoding="utf-8")
    assert error_of(python=python).code == "vllm-in-archive"


def test_an_interpreter_that_is_none(tmp_path, python):
    text = tmp_path / "python"
    text.write_text("no program")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n")
    echo = tmp_path / "echo"
    echo.write_text("#!/bin/sh\necho $* >&2\nexit 1\n")
    for path in (broken, silent, echo, text):
        path.chmod(0o755 if path is not text else 0o644)
    cases = {
        tmp_path / "none": "does not exist",
        tmp_path: "is a folder",
        text: "cannot be started",
        broken: "is no working Python",
        silent: "is no working Python",
        echo: "is no working Python",
    }
    for path, words in cases.items():
        error = error_of(python=path)
        assert (error.code, words in error.message) == ("python-unusable", True), error.message
        assert len(error.message) < 300 + len(str(path)), "an echo of the whole script"
    assert f"--python {quote(str(python))}" in (error_of(python=python.parent.parent).hint or "")


def test_no_vllm_anywhere_names_the_ways_on(python):
    error = error_of(python=python)
    assert error.code == "vllm-not-found"
    assert "--wheel 0.33.0 --into DIR" in (error.hint or "")


def test_a_record_row_is_the_origin(fake_vllm):
    fake = fake_vllm()
    origin = Origin.of(fake.target())
    path = fake.cache_utils.relative_to(fake.site).as_posix()
    assert (origin.source, origin.sha256(path), origin.sha256("vllm/none.py")) == (
        "RECORD",
        sha256(fake.cache_utils),
        None,
    )


@pytest.mark.parametrize("row", ["", "sha512=abc"])
def test_a_row_without_a_usable_hash_is_looked_up_in_the_manifest(real_release, row):
    site = real_release("0.33.0")
    name = "vllm/models/deepseek_v41/common/ops/cache_utils.py"
    record = site / "vllm-0.33.0.dist-info" / "RECORD"
    text = re.sub(f"^{name},[^,]*", f"{name},{row}", record.read_text(), flags=re.MULTILINE)
    record.unlink()
    record.write_text(text)
    origin = Origin.of(find_target(target=site))
    assert (origin.source, origin.sha256(name)) == ("RECORD", sha256(site / name))
    assert origin.sha256("vllm/none.py") is None


def test_without_record_an_unlisted_version_has_no_origin(fake_vllm):
    origin = Origin.of(fake_vllm(version="0.1.0", dist_info=False).target())
    assert (origin.source, origin.sha256("vllm/__init__.py")) == ("none", None)


def test_a_renamed_model_folder_is_verified_through_the_stock_name(fake_vllm):
    fake = fake_vllm(version="0.30.0")
    (fake.root / "models" / "deepseek_v41").rename(fake.root / "models" / "deepseek_v4_1")
    path = fake.root / "models" / "deepseek_v4_1" / "amd" / "rocm.py"
    path.write_bytes(path.read_bytes().replace(b"deepseek_v41", b"deepseek_v4_1"))
    origin = Origin.of(fake.target())
    name = "vllm/models/deepseek_v4_1/amd/rocm.py"
    assert (origin.source, origin.sha256(name)) == ("RECORD", sha256(path))
    path.write_bytes(path.read_bytes() + b"# mine\n")
    assert origin.sha256(name) not in (None, sha256(path))
