"""Plans on fake vLLMs: what happens to which file, and what is refused; no writes."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from deepinfer_cli.errors import ExitCode, FailedError, RefusedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay.payload import sha256
from deepinfer_cli.overlay.plan import Action, plan_install
from tests.conftest import git
from tests.overlay.plans import HOOKED, ROCM_PATH, by_path, carry_out, record_of


def test_a_first_plan_adds_the_payload_then_the_hooks(fake_vllm, fake_payload, fake_manifest):
    fake, payload = fake_vllm(), fake_payload()
    before = fake.snapshot()
    plan = plan_install(fake.target(), payload, fake_manifest)
    assert fake.snapshot() == before
    assert (plan.match, plan.release, plan.skip, plan.adopts) == ("supported", "0.33.0", (), False)
    assert (plan.overlay_version, plan.payload_digest, plan.upgrade_from) == ("0.1.0", payload.digest, None)
    owners = [change.owner for change in plan.changes]
    assert owners == sorted(owners, reverse=True), "payload first, hooks last"
    assert {change.action for change in plan.changes if change.owner == "payload"} == {Action.ADD}
    assert len([change for change in plan.changes if change.owner == "payload"]) == len(payload.files)
    hooked = by_path(plan)[HOOKED]
    source = fake.cache_utils.read_bytes()
    assert hooked.action is Action.REPLACE
    assert hooked.content == source + hook.block()
    assert hooked.before_sha256 == hooked.pristine_sha256 == sha256(source)
    assert hooked.after_sha256 == sha256(hooked.content)
    assert all(
        change.content is None or sha256(change.content) == change.after_sha256 for change in plan.changes
    )
    assert ROCM_PATH not in by_path(plan)


def test_a_module_that_defines_a_replaced_symbol_is_hooked_in_that_release_only(
    fake_vllm, fake_payload, fake_manifest
):
    plan = plan_install(fake_vllm(version="0.30.0").target(), fake_payload(), fake_manifest)
    assert plan.release == "0.30.0"
    assert [change.path for change in plan.changes if change.owner == "hook"] == [ROCM_PATH, HOOKED]


def test_once_carried_out_nothing_is_left_to_do(fake_vllm, fake_payload, fake_manifest):
    fake, payload = fake_vllm(), fake_payload()
    plan = plan_install(fake.target(), payload, fake_manifest)
    carry_out(plan)
    again = plan_install(fake.target(), payload, fake_manifest, record=record_of(plan))
    assert (again.writes, again.adopts) == ((), False)
    assert by_path(again)[HOOKED].pristine_sha256 == by_path(plan)[HOOKED].pristine_sha256
    adopted = plan_install(fake.target(), payload, fake_manifest)
    assert (adopted.writes, adopted.adopts) == ((), True)


def test_bytecode_beside_the_payload_is_no_conflict(fake_vllm, fake_payload, fake_manifest):
    fake, payload = fake_vllm(), fake_payload()
    carry_out(plan_install(fake.target(), payload, fake_manifest))
    cache = fake.root / "deepinfer_sm80" / "__pycache__"
    cache.mkdir()
    (cache / "gate.cpython-312.pyc").write_bytes(b"x")
    assert plan_install(fake.target(), payload, fake_manifest).adopts


def test_an_upgrade_replaces_adds_and_removes_payload_files(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    old = plan_install(fake.target(), fake_payload(extra={"old.py": "X = 1\n"}), fake_manifest)
    carry_out(old)
    new = plan_install(
        fake.target(),
        fake_payload("0.2.0", extra={"new.py": "X = 2\n"}),
        fake_manifest,
        record=record_of(old),
    )
    actions = {change.path.rpartition("sm80/")[2]: change.action for change in new.writes}
    assert actions == {"__init__.py": Action.REPLACE, "new.py": Action.ADD, "old.py": Action.REMOVE}
    assert (new.upgrade_from, new.overlay_version) == ("0.1.0", "0.2.0")
    removed = by_path(new)["vllm/deepinfer_sm80/old.py"]
    assert (removed.content, removed.after_sha256) == (None, None)
    assert by_path(new)[HOOKED].action is Action.KEEP


def test_an_old_payload_file_that_is_gone_already_is_no_change(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    old = plan_install(fake.target(), fake_payload(extra={"old.py": "X = 1\n"}), fake_manifest)
    carry_out(old)
    (fake.root / "deepinfer_sm80" / "old.py").unlink()
    new = plan_install(fake.target(), fake_payload(), fake_manifest, record=record_of(old))
    assert "vllm/deepinfer_sm80/old.py" not in by_path(new)


def test_foreign_files_where_the_payload_goes_are_a_conflict(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    (fake.root / "deepinfer_sm80").mkdir()
    foreign = fake.root / "deepinfer_sm80" / "gate.py"
    foreign.write_text("mine\n")
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert (caught.value.code, caught.value.paths) == ("overlay-conflict", (str(foreign),))
    assert caught.value.message == "1 file is not DeepInfer's where its overlay goes"
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, force=True)
    change = by_path(plan)["vllm/deepinfer_sm80/gate.py"]
    assert change.action is Action.REPLACE
    assert "copy" in change.note


@pytest.mark.parametrize("force", [False, True])
def test_a_users_own_file_in_our_folder_is_no_part_of_a_plan(fake_vllm, fake_payload, fake_manifest, force):
    fake = fake_vllm()
    (fake.root / "deepinfer_sm80").mkdir()
    (fake.root / "deepinfer_sm80" / "mine.txt").write_text("mine\n")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, force=force)
    assert "vllm/deepinfer_sm80/mine.txt" not in by_path(plan)
    carry_out(plan)
    again = plan_install(fake.target(), fake_payload(), fake_manifest, record=record_of(plan), force=force)
    assert not again.writes


@pytest.mark.parametrize("kind", ["linked folder", "file for a folder", "folder for a file", "linked file"])
def test_what_no_copy_could_save_is_refused_even_with_force(
    fake_vllm, fake_payload, fake_manifest, tmp_path, kind
):
    fake = fake_vllm()
    (tmp_path / "elsewhere").mkdir()
    place = fake.root / "deepinfer_sm80"
    if kind == "linked folder":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "file for a folder":
        place.mkdir()
        place = place / "ops"
        place.touch()
    else:
        place = place / "gate.py"
        place.parent.mkdir()
        place.mkdir() if kind == "folder for a file" else place.symlink_to(tmp_path / "elsewhere" / "gate.py")
    for force in (False, True):
        with pytest.raises(RefusedError) as caught:
            plan_install(fake.target(), fake_payload(), fake_manifest, force=force)
        assert (caught.value.code, caught.value.paths) == ("overlay-conflict", (str(place),))


@pytest.mark.parametrize("leads_to", ["folder", "file", "nothing"])
def test_a_link_in_the_payloads_folder_is_refused(fake_vllm, fake_payload, fake_manifest, tmp_path, leads_to):
    fake = fake_vllm()
    place = fake.root / "deepinfer_sm80" / "mine"
    place.parent.mkdir()
    place.symlink_to({"folder": tmp_path, "file": fake.cache_utils, "nothing": tmp_path / "no"}[leads_to])
    for force in (False, True):
        with pytest.raises(RefusedError) as caught:
            plan_install(fake.target(), fake_payload(), fake_manifest, force=force)
        assert (caught.value.code, caught.value.paths) == ("overlay-conflict", (str(place),))


def test_an_older_overlay_without_a_record_is_named(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    carry_out(plan_install(fake.target(), fake_payload("0.0.9", extra={"old.py": ""}), fake_manifest))
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert caught.value.code == "overlay-conflict"
    assert "an overlay of version 0.0.9 is there without a record" in caught.value.message
    assert len(caught.value.paths) == 2
    forced = plan_install(fake.target(), fake_payload(), fake_manifest, force=True)
    assert forced.upgrade_from == "0.0.9"
    assert [change.action for change in forced.writes if change.edited] == [Action.REPLACE, Action.REMOVE]


def test_a_payload_file_edited_after_install_is_drift(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    carry_out(plan)
    (fake.root / "deepinfer_sm80" / "gate.py").write_text("mine\n")
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest, record=record_of(plan))
    assert caught.value.code == "file-drift"
    forced = plan_install(fake.target(), fake_payload(), fake_manifest, record=record_of(plan), force=True)
    assert by_path(forced)["vllm/deepinfer_sm80/gate.py"].action is Action.REPLACE


@pytest.mark.parametrize("after_install", [False, True])
def test_a_hooked_file_edited_by_the_user_is_drift(fake_vllm, fake_payload, fake_manifest, after_install):
    fake, payload = fake_vllm(), fake_payload()
    if after_install:
        carry_out(plan_install(fake.target(), payload, fake_manifest))
    edited = b"# mine\n" + hook.strip(fake.cache_utils.read_bytes())
    fake.cache_utils.write_bytes(b"# mine\n" + fake.cache_utils.read_bytes())
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), payload, fake_manifest)
    assert (caught.value.code, caught.value.exit_code) == ("file-drift", ExitCode.REFUSED)
    assert caught.value.paths == (str(fake.cache_utils),)
    plan = plan_install(fake.target(), payload, fake_manifest, force=True)
    change = by_path(plan)[HOOKED]
    assert change.content == edited + hook.block()
    assert change.pristine_sha256 == sha256(edited)
    assert change.action is (Action.KEEP if after_install else Action.REPLACE)
    if not after_install:
        carry_out(plan)
        again = plan_install(fake.target(), payload, fake_manifest, record=record_of(plan))
        assert again.writes == (), "what --force accepted is not asked about again"


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_a_file_of_vllm_that_is_gone_is_no_symbol_that_differs(
    fake_vllm, fake_payload, fake_manifest, installed, force, partial
):
    fake, payload = fake_vllm(), fake_payload()
    plan = plan_install(fake.target(), payload, fake_manifest)
    if installed:
        carry_out(plan)
    fake.cache_utils.unlink()
    record = record_of(plan) if installed else None
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), payload, fake_manifest, record=record, force=force, partial=partial)
    # an install without it would replace the backups, and its original with them
    assert (caught.value.code, caught.value.paths) == ("file-missing", (str(fake.cache_utils),))
    assert ("rollback" if installed else "reinstall vLLM") in caught.value.hint


def test_a_recorded_file_that_another_vllm_does_not_have_is_not_missed(
    fake_vllm, fake_payload, fake_manifest
):
    fake, payload = fake_vllm(), fake_payload()
    record = record_of(plan_install(fake.target(), payload, fake_manifest))
    entry = replace(next(item for item in record.files if item.owner == "hook"), path="vllm/models/gone.py")
    old = replace(record, target=replace(record.target, version="0.29.0"), files=(*record.files, entry))
    assert plan_install(fake.target(), payload, fake_manifest, record=old).writes


@pytest.mark.parametrize("recorded", [False, True])
def test_an_edit_inside_the_block_is_drift(fake_vllm, fake_payload, fake_manifest, recorded):
    fake, payload = fake_vllm(), fake_payload()
    plan = plan_install(fake.target(), payload, fake_manifest)
    carry_out(plan)
    record = record_of(plan) if recorded else None
    applied = fake.cache_utils.read_bytes()
    fake.cache_utils.write_bytes(applied.replace(b"(__name__)\n", b"(__name__)\nMINE = 1\n"))
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), payload, fake_manifest, record=record)
    assert (caught.value.code, caught.value.paths) == ("file-drift", (str(fake.cache_utils),))
    forced = by_path(plan_install(fake.target(), payload, fake_manifest, record=record, force=True))[HOOKED]
    assert (forced.action, forced.content, forced.edited) == (Action.REPLACE, applied, True)


def test_a_block_that_another_version_wrote_is_replaced_where_the_record_knows_it(
    fake_vllm, fake_payload, fake_manifest
):
    fake, payload = fake_vllm(), fake_payload()
    plan = plan_install(fake.target(), payload, fake_manifest)
    carry_out(plan)
    older = fake.cache_utils.read_bytes().replace(b"(__name__)\n", b"(__name__, 1)\n")
    fake.cache_utils.write_bytes(older)
    record = record_of(plan)
    files = tuple(
        replace(entry, applied_sha256=sha256(older)) if entry.path == HOOKED else entry
        for entry in record.files
    )
    again = plan_install(fake.target(), payload, fake_manifest, record=replace(record, files=files))
    assert [(change.path, change.action, change.edited) for change in again.writes] == [
        (HOOKED, Action.REPLACE, False)
    ]


def test_text_after_the_block_is_drift(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    carry_out(plan_install(fake.target(), fake_payload(), fake_manifest))
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + b"MINE = 1\n")
    with pytest.raises(RefusedError, match=r"1 file is not as in vLLM 0\.33\.0"):
        plan_install(fake.target(), fake_payload(), fake_manifest)


def test_a_file_without_a_final_newline_is_recognised_with_its_block(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    original = fake.cache_utils.read_bytes().rstrip(b"\n")
    fake.cache_utils.write_bytes(original)
    fake.reinstall_record()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    carry_out(plan)
    again = plan_install(fake.target(), fake_payload(), fake_manifest)
    assert again.adopts
    assert by_path(again)[HOOKED].pristine_sha256 == sha256(original)


def test_without_record_or_commit_a_file_must_be_listed(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(dist_info=False)
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert caught.value.code in {"not-verifiable", "file-drift"}
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, force=True)
    assert by_path(plan)[HOOKED].pristine_sha256 == sha256(fake.cache_utils.read_bytes())


def test_a_checkout_is_compared_with_its_head(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(checkout=True)
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    assert by_path(plan)[HOOKED].pristine_sha256 == sha256(fake.cache_utils.read_bytes())
    carry_out(plan)
    assert plan_install(fake.target(), fake_payload(), fake_manifest).adopts
    git(fake.site, "checkout", "-q", "--", ".")
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + b"# local edit\n")
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert caught.value.code == "file-drift"
    assert f"`git -C {fake.site} diff` shows what changed" in (caught.value.hint or "")
    git(fake.site, "commit", "-q", "-a", "-m", "Keep it")
    assert plan_install(fake.target(), fake_payload(), fake_manifest).writes


def test_a_checkout_in_which_the_overlay_was_committed_is_not_drift(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(checkout=True)
    carry_out(plan_install(fake.target(), fake_payload(), fake_manifest))
    git(fake.site, "add", "-A")
    git(fake.site, "commit", "-q", "-m", "Carry the overlay")
    assert plan_install(fake.target(), fake_payload(), fake_manifest).adopts


def test_a_checkout_without_a_usable_git_says_what_it_needs(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(checkout=True)
    shutil.rmtree(fake.site / ".git" / "objects")
    with pytest.raises(FailedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert caught.value.code == "git-unavailable"
    assert str(fake.site) in caught.value.message


def test_a_reinstalled_vllm_gets_its_hooks_back(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.30.0")
    old = plan_install(fake.target(), fake_payload(), fake_manifest)
    carry_out(old)
    fake.reinstall("0.33.0")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, record=record_of(old))
    assert [change.path for change in plan.writes] == [HOOKED]
    assert plan.release == "0.33.0"
