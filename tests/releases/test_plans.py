"""Plans and patches on the four real releases."""

from __future__ import annotations

import ast
import shutil

import pytest

from deepinfer_cli.detect.vllm import Origin, find_target
from deepinfer_cli.errors import RefusedError, UnsupportedError
from deepinfer_cli.overlay import hook, manifest, payload
from deepinfer_cli.overlay.patchfile import unified_patch, write_tree
from deepinfer_cli.overlay.payload import sha256
from deepinfer_cli.overlay.plan import plan_install
from scripts import make_patches
from tests.conftest import RELEASES, git, snapshot
from tests.fakes import hooked_paths, rewrite
from tests.overlay.plans import carry_out

pytestmark = pytest.mark.release
CACHE_UTILS = "vllm/models/deepseek_v41/common/ops/cache_utils.py"
ROCM = "vllm/models/deepseek_v41/amd/rocm.py"
SPARSE = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"


def plan_of(folder, **options):
    return plan_install(find_target(target=folder), payload.bundled(), manifest.load(), **options)


def rename(folder, version: str) -> None:
    """Make the metadata say `version`."""
    info = next(folder.glob("vllm-*.dist-info"))
    rewrite(info / "METADATA", f"Version: {info.name[5:-10]}", f"Version: {version}")


@pytest.mark.parametrize("version", RELEASES)
def test_supported_and_every_file_compiles(real_release, version):
    folder = real_release(version)
    before = snapshot(folder)
    plan = plan_of(folder)
    assert snapshot(folder) == before, "a plan writes nothing"
    assert (plan.match, plan.release, plan.skip, plan.target.version) == ("supported", version, (), version)
    assert all(op.installed for op in plan.ops)
    hooks = [change for change in plan.changes if change.owner == "hook"]
    assert [change.path for change in hooks] == hooked_paths(version)
    listed = manifest.load().releases[version].files
    for change in hooks:
        module = change.path.removeprefix("vllm/").replace("deepseek_v41", "{layout}")
        assert change.pristine_sha256 == change.before_sha256 == listed[module]
    for change in plan.changes:
        if change.path.endswith(".py"):
            ast.parse(change.content, change.path)


@pytest.mark.parametrize("version", RELEASES)
def test_patched_exported_and_planned_trees_are_equal_and_git_takes_the_patch_back(
    real_release, tmp_path, version
):
    patched, copied, written = (tmp_path / name for name in ("patched tree", "copied", "written"))
    # a repository around it all: the case in which `git apply` may skip files and still say 0
    git(tmp_path, "init", "-q")
    for folder in (patched, copied, written):
        real_release(version, folder)
    before = snapshot(patched)
    plan = plan_of(written)
    patch = tmp_path / "vllm.patch"
    patch.write_bytes(unified_patch(plan))
    git(patched, "apply", "--whitespace=nowarn", str(patch))
    write_tree(plan, tmp_path / "export")
    for path in (tmp_path / "export").rglob("*.py"):
        # cp -r writes through links; the tree here is hard-linked to the cache
        target = copied / path.relative_to(tmp_path / "export")
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tmp_path / "export", copied, dirs_exist_ok=True, copy_function=shutil.copyfile)
    carry_out(plan)
    assert snapshot(patched) == snapshot(written) == snapshot(copied) != before
    for change in plan.changes:
        assert sha256((patched / change.path).read_bytes()) == change.after_sha256
    git(patched, "apply", "-R", "--whitespace=nowarn", str(patch))
    assert snapshot(patched) == before


@pytest.mark.parametrize("version", RELEASES)
def test_the_committed_patch_is_current(pristine_release, version):
    path = make_patches.PATCHES / version / make_patches.NAME
    assert path.is_file(), "run: python scripts/make_patches.py"
    assert path.read_bytes() == unified_patch(plan_of(pristine_release(version))), (
        "not current; run: python scripts/make_patches.py"
    )


@pytest.mark.parametrize("version", RELEASES)
def test_a_patched_tree_without_a_record_is_adopted(real_release, version):
    folder = real_release(version)
    carry_out(plan_of(folder))
    plan = plan_of(folder)
    assert (plan.writes, plan.adopts) == ((), True)


@pytest.mark.parametrize("version", RELEASES)
def test_an_unknown_release_number_with_equal_fingerprints_is_accepted_and_said(real_release, version):
    folder = real_release(version)
    rename(folder, "0.99.0.dev7+g0123456")
    plan = plan_of(folder)
    assert (plan.match, plan.release) == ("compatible", version)
    assert any(
        "0.99.0.dev7+g0123456 is not a listed release" in note and version in note for note in plan.notes
    )


def test_a_listed_number_on_another_releases_files_is_said(real_release):
    folder = real_release("0.31.0")
    rename(folder, "0.33.0")
    plan = plan_of(folder)
    assert (plan.match, plan.release) == ("compatible", "0.31.0")
    assert any("says it is 0.33.0" in note for note in plan.notes)


@pytest.mark.parametrize("version", RELEASES)
def test_one_changed_symbol_is_refused_by_name_and_partial_plans_the_rest(real_release, version):
    folder = real_release(version)
    rewrite(
        folder / CACHE_UTILS, "_SPARSE_PREFILL_TOPK_ALIGNMENT = 128", "_SPARSE_PREFILL_TOPK_ALIGNMENT = 64"
    )
    with pytest.raises(UnsupportedError) as caught:
        plan_of(folder)
    key = "models/deepseek_v41/common/ops/cache_utils.py::_SPARSE_PREFILL_TOPK_ALIGNMENT"
    assert caught.value.paths == (f"{key} (changed)",)
    assert f"vLLM {version} is listed, but" in caught.value.message
    assert "_SPARSE_PREFILL_TOPK_ALIGNMENT (changed)" in caught.value.message
    with pytest.raises(RefusedError) as refused:
        plan_of(folder, partial=True)
    assert refused.value.code == "file-drift", "it also is not the file that was published"
    plan = plan_of(folder, partial=True, force=True)
    assert plan.skip == ("combine",)
    change = next(change for change in plan.changes if change.path == CACHE_UTILS)
    assert change.content.endswith(hook.block(("combine",)))
    assert ROCM not in [change.path for change in plan.writes]


def test_a_changed_caller_takes_every_op_that_it_calls_with_it(real_release):
    folder = real_release("0.33.0")
    rewrite(
        folder / ROCM,
        "combined_indices, combined_lens = combine_topk",
        "combined_indices, lens = combine_topk",
    )
    with pytest.raises(UnsupportedError) as caught:
        plan_of(folder)
    name = "models/deepseek_v41/amd/rocm.py::DeepseekV41ROCMAiterMLAAttention"
    assert caught.value.paths == (f"{name} (changed)", f"{name}._forward_prefill (changed)")
    assert "without attention, swa_replay the model does not run" in (caught.value.hint or "")
    plan = plan_of(folder, partial=True)
    assert plan.skip == ("attention", "combine", "gather", "sparse_prefill", "swa_replay", "yoco")
    assert sum("THE MODEL DOES NOT RUN" in note for note in plan.notes) == 2


def test_a_changed_module_that_no_layout_names_is_refused_too(real_release):
    folder = real_release("0.33.0")
    rewrite(
        folder / SPARSE, "def rocm_sparse_attn_decode(\n    q:", "def rocm_sparse_attn_decode(\n    queries:"
    )
    with pytest.raises(UnsupportedError) as caught:
        plan_of(folder)
    assert caught.value.paths == (
        "v1/attention/ops/rocm_aiter_mla_sparse.py::rocm_sparse_attn_decode (changed)",
    )
    plan = plan_of(folder, partial=True, force=True)
    assert plan.skip == ("attention", "sparse_decode")
    assert SPARSE in [change.path for change in plan.writes]


def fork(folder) -> None:
    """What the fork did: another name for the model folder, in every import."""
    models = folder / "vllm" / "models"
    (models / "deepseek_v41").rename(models / "deepseek_v4_1")
    for path in (models / "deepseek_v4_1").rglob("*.py"):
        text = path.read_bytes()
        path.unlink()
        path.write_bytes(text.replace(b"deepseek_v41", b"deepseek_v4_1"))


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("version", RELEASES)
def test_the_fork_layout_installs_and_its_files_are_verified(real_release, version, metadata):
    folder = real_release(version)
    fork(folder)
    if not metadata:
        shutil.rmtree(next(folder.glob("vllm-*.dist-info")))
    plan = plan_of(folder)
    assert (plan.match, plan.release, plan.skip) == ("supported", version, ())
    hooks = [change for change in plan.changes if change.owner == "hook"]
    assert {change.path for change in hooks} >= {CACHE_UTILS.replace("v41", "v4_1")}
    assert all(change.pristine_sha256 == change.before_sha256 for change in hooks)
    assert Origin.of(plan.target).source == ("RECORD" if metadata else "manifest")
    carry_out(plan)
    assert plan_of(folder).adopts
    rewrite(folder / hooks[0].path, "import torch", "import torch  # mine")
    with pytest.raises(RefusedError) as caught:
        plan_of(folder)
    assert caught.value.code == "file-drift"


def test_without_a_record_the_manifests_hashes_tell_what_is_pristine(real_release):
    folder = real_release("0.31.0")
    shutil.rmtree(next(folder.glob("vllm-*.dist-info")))
    plan = plan_of(folder)
    assert (plan.match, plan.target.version) == ("supported", "0.31.0")
    rewrite(folder / ROCM, "import torch", "import torch  # mine")
    with pytest.raises(RefusedError) as caught:
        plan_of(folder)
    assert (caught.value.code, caught.value.paths) == ("file-drift", (str(folder / ROCM),))
