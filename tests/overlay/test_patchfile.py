"""Patches and exported trees, judged by the bytes that git and cp leave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_cli.errors import RefusedError
from deepinfer_cli.overlay.patchfile import unified_patch, write_tree
from deepinfer_cli.overlay.payload import sha256
from deepinfer_cli.overlay.plan import Action, FileChange, Plan, plan_install
from tests.conftest import git
from tests.overlay.plans import HOOKED, carry_out


def apply(folder, patch: bytes, *options: str):
    path = folder.parent / "test.patch"
    path.write_bytes(patch)
    return git(folder, "apply", "--whitespace=nowarn", *options, str(path), check=False)


@pytest.mark.parametrize("newline", [True, False])
def test_git_apply_writes_what_install_writes_and_takes_it_back(
    fake_vllm, fake_payload, fake_manifest, newline
):
    fake = fake_vllm(version="0.30.0")
    if not newline:
        fake.cache_utils.write_bytes(fake.cache_utils.read_bytes().rstrip(b"\n"))
        fake.reinstall_record()
    before = fake.snapshot()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    patch = unified_patch(plan)
    assert (b"\\ No newline" in patch) is not newline
    done = apply(fake.site, patch)
    assert done.returncode == 0, done.stderr
    for change in plan.changes:
        path = fake.site / change.path
        assert path.read_bytes() == change.content
        assert path.stat().st_mode & 0o777 == 0o644
    assert apply(fake.site, patch, "-R").returncode == 0
    assert fake.snapshot() == before


def test_a_venv_inside_another_repository_is_patched_when_git_is_kept_from_it(
    fake_vllm, fake_payload, fake_manifest, tmp_path
):
    git(tmp_path, "init", "-q")
    fake = fake_vllm()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    # `git` here sets GIT_CEILING_DIRECTORIES; without it git skips the files and still says 0
    assert apply(fake.site, unified_patch(plan)).returncode == 0
    assert sha256(fake.cache_utils.read_bytes()) == next(
        c.after_sha256 for c in plan.changes if c.path == HOOKED
    )


def test_the_patch_is_the_same_whatever_is_installed(fake_vllm, fake_payload, fake_manifest):
    fake, payload = fake_vllm(), fake_payload()
    plan = plan_install(fake.target(), payload, fake_manifest)
    carry_out(plan)
    assert unified_patch(plan_install(fake.target(), payload, fake_manifest)) == unified_patch(plan)


def test_skipped_ops_travel_in_the_patch(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.34.0")
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes().replace(b"topk + window", b"window + topk"))
    fake.reinstall_record()
    patch = unified_patch(plan_install(fake.target(), fake_payload(), fake_manifest, partial=True))
    assert b'+_deepinfer_bind(__name__, skip=("combine",))\n' in patch


def test_an_exported_tree_is_what_install_writes(fake_vllm, fake_payload, fake_manifest, tmp_path):
    fake = fake_vllm()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    written = write_tree(plan, tmp_path / "export")
    assert {path.relative_to(tmp_path / "export").as_posix(): path.read_bytes() for path in written} == {
        change.path: change.content for change in plan.changes
    }
    with pytest.raises(RefusedError) as caught:
        write_tree(plan, tmp_path / "export")
    assert caught.value.code == "into-not-empty"


def change_of(path: str, old: bytes | None, new: bytes) -> FileChange:
    before = None if old is None else sha256(old)
    return FileChange(
        path, Action.REPLACE, "payload" if old is None else "hook", before, sha256(new), new, before
    )


@settings(max_examples=25, deadline=None)
@given(content=st.binary(max_size=200).filter(lambda data: b"\0" not in data), crlf=st.booleans())
def test_any_text_is_added_exactly(tmp_path_factory, content, crlf):
    content = content.replace(b"\n", b"\r\n") if crlf else content
    folder = tmp_path_factory.mktemp("any")
    plan = Plan(None, "", "", "supported", "", (), (), (change_of("vllm/new.py", None, content),))
    patch = unified_patch(plan)
    done = apply(folder, patch)
    assert done.returncode == 0, done.stderr
    assert (folder / "vllm" / "new.py").read_bytes() == content
