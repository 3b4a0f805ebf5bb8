"""The static level on a real release, in process: installed by the engine, then damaged in every way it must see."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_cli import app
from deepinfer_cli.detect.vllm import find_target
from deepinfer_cli.validate import static
from deepinfer_cli.validate.model import Status
from tests.conftest import RELEASES
from tests.fakes import rewrite

pytestmark = pytest.mark.release
CACHE_UTILS = "vllm/models/deepseek_v41/common/ops/cache_utils.py"


def _install(parent: Path, *more: str) -> None:
    assert (
        app.main(["install", "--target", str(parent), "--arch", "sm80", "--yes", "--no-verify", *more]) == 0
    )


def _check(parent: Path) -> dict[str, tuple[Status, str]]:
    target = find_target(target=parent)
    return {item.case: (item.status, item.reason) for item in static.check_target(target)}


def _failed(parent: Path) -> dict[str, str]:
    return {case: reason for case, (status, reason) in _check(parent).items() if status is Status.FAILED}


@pytest.fixture
def installed(real_release) -> Path:
    parent = real_release("0.33.0")
    _install(parent)
    return parent


@pytest.mark.parametrize("version", RELEASES)
def test_an_install_passes_every_check_on_every_release(real_release, version):
    parent = real_release(version)
    _install(parent)
    names = ("installed", "transaction", "files", "fingerprints", "hooks", "payload", "compiles")
    assert _check(parent) == {f"overlay[{name}]": (Status.PASSED, "") for name in names}
    hooked = static.hooked_modules(find_target(target=parent))
    assert ("vllm.models.deepseek_v41.amd.rocm" in hooked) is (version in ("0.30.0", "0.31.0"))


def test_a_vllm_without_the_overlay_fails_and_says_what_to_do(real_release):
    reasons = _failed(real_release("0.33.0"))
    assert list(reasons) == ["overlay[installed]"] and "deepinfer install" in reasons["overlay[installed]"]


def test_an_unfinished_transaction(installed: Path):
    (find_target(target=installed).state_dir / "journal.json").write_text("{}")
    assert "interrupted" in _failed(installed)["overlay[transaction]"]


def test_an_edited_payload_file(installed: Path):
    path = installed / "vllm" / "deepinfer_sm80" / "gate.py"
    path.write_text(path.read_text() + "\n# edited\n")
    reasons = _failed(installed)
    assert "vllm/deepinfer_sm80/gate.py is modified" in reasons["overlay[files]"]
    assert "its digest is" in reasons["overlay[payload]"]


def test_a_file_that_does_not_compile(installed: Path):
    path = installed / "vllm" / "deepinfer_sm80" / "gate.py"
    path.write_text("def broken(:\n")
    assert "vllm/deepinfer_sm80/gate.py" in _failed(installed)["overlay[compiles]"]


def test_a_hook_block_that_is_gone(installed: Path):
    from deepinfer_cli.overlay import hook

    path = installed / CACHE_UTILS
    stripped = hook.strip(path.read_bytes())
    path.unlink()
    path.write_bytes(stripped)
    assert _failed(installed)["overlay[hooks]"] == f"{CACHE_UTILS} has no hook block"


def test_a_hook_block_that_was_edited(installed: Path):
    path = installed / CACHE_UTILS
    rewrite(path, "_deepinfer_bind(__name__)", "pass")
    assert "the hook block was edited" in _failed(installed)["overlay[hooks]"]


def test_a_changed_symbol(installed: Path):
    path = installed / CACHE_UTILS
    rewrite(path, "combined_topk = (", "combined_topk = 1 + (")
    assert "combine_topk_swa_indices is not as in vLLM 0.33.0" in _failed(installed)["overlay[fingerprints]"]


def test_a_skipped_op_is_named_and_never_counts_as_passed(real_release):
    parent = real_release("0.33.0")
    path = parent / CACHE_UTILS
    rewrite(path, "combined_topk = (", "combined_topk = 1 + (")
    _install(parent, "--partial", "--force")
    found = _check(parent)
    assert found["overlay[op combine]"] == (Status.SKIPPED, "left to stock by the install (--partial)")
    assert _failed(parent) == {}
