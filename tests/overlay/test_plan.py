"""Plans on fake vLLMs: every decision, no writes."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from deepinfer_cli.errors import ExitCode, FailedError, RefusedError, UnsupportedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import sha256
from deepinfer_cli.overlay.plan import Action, plan_install
from deepinfer_cli.overlay.record import FileEntry, Record, RecordTarget
from tests.conftest import CACHE_UTILS, git

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


@pytest.mark.parametrize("name", ["gate.py", "mine.txt"])
def test_foreign_files_where_the_payload_goes_are_a_conflict(fake_vllm, fake_payload, fake_manifest, name):
    fake = fake_vllm()
    (fake.root / "deepinfer_sm80").mkdir()
    foreign = fake.root / "deepinfer_sm80" / name
    foreign.write_text("mine\n")
    with pytest.raises(RefusedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert (caught.value.code, caught.value.paths) == ("overlay-conflict", (str(foreign),))
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, force=True)
    change = by_path(plan)[f"vllm/deepinfer_sm80/{name}"]
    assert change.action is (Action.REPLACE if name == "gate.py" else Action.REMOVE)
    assert "copy" in change.note


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


def test_text_after_the_block_is_drift(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    carry_out(plan_install(fake.target(), fake_payload(), fake_manifest))
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + b"MINE = 1\n")
    with pytest.raises(RefusedError, match="differ from what vLLM"):
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


def test_an_unlisted_version_with_equal_symbols_is_compatible(fake_vllm, fake_payload, fake_manifest):
    plan = plan_install(fake_vllm(version="0.33.1.dev3+gabc").target(), fake_payload(), fake_manifest)
    assert (plan.match, plan.release) == ("compatible", "0.33.0")
    assert any("0.33.1.dev3+gabc is not a listed release" in note and "0.33.0" in note for note in plan.notes)


def test_a_local_build_is_compared_with_its_base_release_first(fake_vllm, fake_payload, fake_manifest):
    twin = dataclasses.replace(fake_manifest.releases["0.33.0"], version="0.34.0")
    manifest = Manifest(fake_manifest.ops, {**fake_manifest.releases, "0.34.0": twin})
    plan = plan_install(fake_vllm(version="0.33.0+cu129").target(), fake_payload(), manifest)
    assert (plan.match, plan.release) == ("compatible", "0.33.0")


def test_a_listed_number_with_another_releases_symbols_is_compatible(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.33.0")
    (fake.site / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.30.0\n")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    assert (plan.match, plan.release) == ("compatible", "0.33.0")
    assert any("says it is 0.30.0" in note for note in plan.notes)


def change_symbol(fake, old: bytes, new: bytes) -> None:
    path = fake.cache_utils
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    fake.reinstall_record()


def test_one_changed_symbol_is_refused_by_name_and_partial_installs_the_rest(
    fake_vllm, fake_payload, fake_manifest
):
    fake = fake_vllm(version="0.34.0")
    change_symbol(fake, b"return topk + window", b"return window + topk")
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    error = caught.value
    assert (error.code, error.exit_code) == ("vllm-version-unsupported", ExitCode.UNSUPPORTED)
    assert error.paths == (f"{CACHE_UTILS}::combine_indices",)
    assert "combine_indices (changed)" in error.message
    assert "0.33.0" in error.message
    assert "--partial installs the ops that fit: gather" in (error.hint or "")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, partial=True)
    assert plan.skip == ("combine",)
    assert by_path(plan)[HOOKED].content.endswith(hook.block(("combine",)))
    ops = {op.name: op for op in plan.ops}
    assert ops["gather"].installed
    assert not ops["combine"].installed
    assert ops["combine"].differing == (f"{CACHE_UTILS}::combine_indices",)
    assert any("combine is left to stock" in note for note in plan.notes)


def test_a_listed_version_whose_symbol_changed_is_said_to_be_that(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.33.0")
    change_symbol(fake, b"def gather_cache(out, cache, lens)", b"def gather_all(out, cache, lens)")
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert "vLLM 0.33.0 is listed, but this copy differs" in caught.value.message
    assert "gather_cache (missing)" in caught.value.message


def test_partial_with_no_op_that_fits_is_refused(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    fake.cache_utils.write_bytes(b"def broken(:\n")
    fake.reinstall_record()
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest, partial=True)
    assert "gather_cache (unreadable)" in caught.value.message
    assert "--partial" not in (caught.value.hint or "")


def test_partial_leaves_modules_alone_that_no_installed_op_needs(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.30.0")
    change_symbol(fake, b"return topk + window", b"return window")
    fake.rocm.write_bytes(hook.append(fake.rocm.read_bytes()))
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, partial=True)
    taken_out = by_path(plan)[ROCM_PATH]
    assert hook.find(taken_out.content) is None
    assert taken_out.after_sha256 == taken_out.pristine_sha256
    assert "taken out" in taken_out.note


def test_an_op_of_the_enable_group_is_never_skipped_quietly(fake_vllm, fake_payload, fake_manifest):
    ops = tuple(
        dataclasses.replace(op, group="enable") if op.name == "combine" else op for op in fake_manifest.ops
    )
    fake = fake_vllm(version="0.34.0")
    change_symbol(fake, b"return topk + window", b"return window + topk")
    plan = plan_install(fake.target(), fake_payload(), Manifest(ops, fake_manifest.releases), partial=True)
    assert any("WITHOUT combine THE MODEL DOES NOT RUN" in note for note in plan.notes)


def test_a_vllm_without_the_model_is_told_so(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.29.0")
    shutil.rmtree(fake.root / "models" / "deepseek_v41")
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    assert caught.value.code == "layout-unknown"
    assert "0.29.0" in caught.value.message


def test_the_fork_layout_fits_with_rewritten_imports(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm(version="0.30.0", layout="deepseek_v4_1")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    assert plan.match == "supported"
    assert [change.path for change in plan.changes if change.owner == "hook"] == [
        "vllm/models/deepseek_v4_1/amd/rocm.py",
        "vllm/models/deepseek_v4_1/common/ops/cache_utils.py",
    ]


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
    git(fake.site, "commit", "-q", "-a", "-m", "Keep it")
    assert plan_install(fake.target(), fake_payload(), fake_manifest).writes


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
