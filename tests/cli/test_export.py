"""`deepinfer export`: the three forms, and that each equals what an install writes."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm, git, snapshot

HOOKED = "models/deepseek_v41/common/ops/cache_utils.py"


@pytest.fixture
def installed(cli: Cli, fake: FakeVllm, tmp_path: Path) -> dict[str, tuple[str, int, str]]:
    """What an install makes of a copy of `fake`."""
    copy = FakeVllm(tmp_path / "copy", fake.version, fake.layout)
    shutil.copytree(fake.site, copy.site)
    install_into(cli, copy)
    return snapshot(copy.root)


def test_a_patch_goes_to_stdout_and_gives_the_installed_tree(
    cli: Cli, fake: FakeVllm, installed: dict[str, tuple[str, int, str]], tmp_path: Path
) -> None:
    run = cli("export", "patch", "--target", fake.site)
    assert run.code == 0
    assert run.out.startswith("diff --git a/vllm/deepinfer_sm80/__init__.py")
    file = tmp_path / "sm80.patch"
    written = cli("export", "patch", "--target", fake.site, "--output", file)
    assert file.read_text() == run.out
    assert written.out.splitlines()[0] == f"wrote {file}"
    start = snapshot(fake.root)
    # a venv inside a project's repository: plain `git apply` would skip every file there
    git(tmp_path, "init", "-q")
    subprocess.run(written.out.splitlines()[1].removeprefix("apply with: "), shell=True, check=True)
    assert snapshot(fake.root) == installed
    assert cli("status", "--target", fake.site, "--json").document["data"]["state"] == "unrecorded"
    git(fake.site, "apply", "-R", str(file))
    assert snapshot(fake.root) == start


def test_a_patch_file_is_not_overwritten_without_force(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    file = tmp_path / "mine.patch"
    file.write_text("mine")
    run = cli("export", "patch", "--target", fake.site, "--output", file)
    assert run.code == 4
    assert "error[output-exists]" in run.err
    assert file.read_text() == "mine"
    assert cli("export", "patch", "--target", fake.site, "--output", file, "--force").code == 0
    assert file.read_text() != "mine"


def test_json_holds_the_patch(cli: Cli, fake: FakeVllm) -> None:
    text = cli("export", "patch", "--target", fake.site).out
    document = cli("export", "patch", "--target", fake.site, "--json").document
    assert document["command"] == "export"
    assert document["data"]["patch"] == text


def test_a_tree_copied_over_vllm_gives_the_installed_tree(
    cli: Cli, fake: FakeVllm, installed: dict[str, tuple[str, int, str]], tmp_path: Path
) -> None:
    into = tmp_path / "out put"
    run = cli("export", "tree", "--target", fake.site, "--into", into)
    assert run.code == 0
    assert run.out.splitlines()[0] == f"wrote 6 files below {into}"
    peer = tmp_path / "uv-cache.py"
    os.link(fake.cache_utils, peer)
    stock = peer.read_bytes()
    subprocess.run(shlex.split(run.out.splitlines()[1].removeprefix("apply with: ")), check=True)
    assert snapshot(fake.root) == installed
    assert peer.read_bytes() == stock


def test_a_patch_goes_to_a_device_and_not_to_a_folder(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    assert cli("export", "patch", "--target", fake.site, "--output", "/dev/null").code == 0
    run = cli("export", "patch", "--target", fake.site, "--output", tmp_path)
    assert (run.code, run.err) == (2, f"error[usage]: {tmp_path} is a folder\nhint: name a file\n")
    file = tmp_path / "file"
    file.write_text("mine")
    run = cli("export", "tree", "--target", fake.site, "--into", file, "--force")
    assert run.code == 2
    assert f"--into {file} is a file" in run.err


@pytest.mark.parametrize("service", ["", "a:b", "my llm"])
def test_a_service_that_compose_would_refuse_is_refused(
    cli: Cli, fake: FakeVllm, tmp_path: Path, service: str
) -> None:
    run = cli("export", "docker", "--target", fake.site, "--into", tmp_path / "out", "--service", service)
    assert run.code == 2
    assert "error[usage]: --service" in run.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["tree", "docker", "patch"])
@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_leaves_no_part_of_an_export(
    cli: Cli, fake: FakeVllm, tmp_path: Path, form: str, again: bool
) -> None:
    out = tmp_path / "new" / "out"
    where = ("--output", out) if form == "patch" else ("--into", out)
    if again:
        assert cli("export", form, "--target", fake.site, *where).code == 0
    start = snapshot(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        run = cli("export", form, "--target", fake.site, *where, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.code == 1
    assert "error[no-space]" in run.err
    assert out.exists() == again
    assert form == "patch" or snapshot(tmp_path) == start


@pytest.mark.parametrize("form", ["tree", "docker"])
def test_a_folder_with_content_is_refused_without_force(
    cli: Cli, fake: FakeVllm, tmp_path: Path, form: str
) -> None:
    into = tmp_path / "out"
    into.mkdir()
    (into / "mine.txt").write_text("keep")
    run = cli("export", form, "--target", fake.site, "--into", into)
    assert run.code == 4
    assert "error[output-exists]" in run.err
    for _ in range(2):
        assert cli("export", form, "--target", fake.site, "--into", into, "--force").code == 0
    assert (into / "mine.txt").read_text() == "keep"


def test_docker_mounts_files_read_only_and_never_the_tree(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    into = tmp_path / "mounts"
    run = cli("export", "docker", "--target", fake.site, "--into", into, "--service", "my-llm")
    assert run.code == 0
    root = "/usr/local/lib/python3.12/dist-packages/vllm"
    flags = (into / "docker-run.flags").read_text().splitlines()
    assert flags == [
        f"--mount type=bind,source={into}/vllm/{HOOKED},target={root}/{HOOKED},readonly",
        f"--mount type=bind,source={into}/vllm/deepinfer_sm80,target={root}/deepinfer_sm80,readonly",
    ]
    for line in flags:
        assert f"  {line}" in run.out
        source = shlex.split(line)[1].split("source=")[1].split(",")[0]
        assert Path(source).exists()
    compose = (into / "compose.deepinfer.yaml").read_text()
    assert '  "my-llm":\n    volumes:\n' in compose
    assert compose.count("type: bind") == compose.count("read_only: true") == 2
    assert f'        target: "{root}"\n' not in compose
    assert "# made for the files of vllm/vllm-openai:v0.33.0" in compose


def test_the_container_root_is_an_option(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    into = tmp_path / "a b"
    cli("export", "docker", "--target", fake.site, "--into", into, "--container-root", "/opt/vllm/")
    assert "target=/opt/vllm/deepinfer_sm80,readonly" in (into / "docker-run.flags").read_text()
    relative = cli(
        "export", "docker", "--target", fake.site, "--into", tmp_path / "x", "--container-root", "opt"
    )
    assert relative.code == 2


def test_an_installed_vllm_exports_the_same(cli: Cli, fake: FakeVllm) -> None:
    before = cli("export", "patch", "--target", fake.site).out
    install_into(cli, fake)
    assert cli("export", "patch", "--target", fake.site).out == before


def test_an_export_never_goes_into_a_vllm(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    start = fake.snapshot()
    for form in ("tree", "docker"):
        run = cli("export", form, "--target", fake.site, "--into", fake.site, "--force")
        assert run.code == 4
        assert "error[output-exists]: the folder holds a vLLM" in run.err
    assert fake.snapshot() == start
