"""Which vLLM fits: supported, compatible, in part, not at all."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from deepinfer_cli.errors import ExitCode, UnsupportedError
from deepinfer_cli.overlay import hook, match
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.plan import plan_install
from tests.conftest import CACHE_UTILS
from tests.overlay.plans import HOOKED, ROCM_PATH, by_path, change_symbol


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


def test_one_changed_symbol_is_refused_by_name_and_partial_installs_the_rest(
    fake_vllm, fake_payload, fake_manifest
):
    fake = fake_vllm(version="0.34.0")
    change_symbol(fake, b"return topk + window", b"return window + topk")
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), fake_manifest)
    error = caught.value
    assert (error.code, error.exit_code) == ("vllm-version-unsupported", ExitCode.UNSUPPORTED)
    shown = CACHE_UTILS.replace("{layout}", fake.layout)
    assert error.paths == (f"{shown}::combine_indices (changed)",)
    assert "combine_indices (changed)" in error.message
    assert "0.33.0" in error.message
    assert "--partial installs the ops that fit: gather" in (error.hint or "")
    plan = plan_install(fake.target(), fake_payload(), fake_manifest, partial=True)
    assert plan.skip == ("combine",)
    assert by_path(plan)[HOOKED].content.endswith(hook.block(("combine",)))
    ops = {op.name: op for op in plan.ops}
    assert ops["gather"].installed
    assert not ops["combine"].installed
    assert ops["combine"].differing == (f"{shown}::combine_indices",)
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
    assert not hook.find(taken_out.content)
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
    with pytest.raises(UnsupportedError) as caught:
        plan_install(fake.target(), fake_payload(), Manifest(ops, fake_manifest.releases))
    assert caught.value.hint == (
        "--partial installs the ops that fit: gather; without combine the model does not run on this GPU family"
    )


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


def test_what_is_too_deep_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """How deep a source may be depends on the caller: the answer is not kept."""
    real, raised = match.fingerprint.fingerprints, [RecursionError(), MemoryError()]

    def read(source: str, names: tuple[str, ...]) -> dict[str, str]:
        if raised:
            raise raised.pop()
        return real(source, names)

    monkeypatch.setattr(match.fingerprint, "fingerprints", read)
    answers = [match._fingerprints(b"too_deep = 1\n", ("too_deep",))["too_deep"] for _ in range(3)]
    assert answers[:2] == [match.UNREADABLE] * 2 and len(answers[2]) == 64
