"""What `status` says is what is there, and the command it names works."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable

import pytest

from deepinfer_cli.overlay import hook
from tests.cli.conftest import Cli, Run, install_into
from tests.cli.test_app import heavy_imports
from tests.conftest import FakeVllm

MINE = b"# mine\n"


def follow(cli: Cli, shown: Run) -> Run:
    """Runs the command that `status` named."""
    line = next(text for text in shown.err.splitlines() if text.startswith("next: deepinfer "))
    words = shlex.split(line.removeprefix("next: deepinfer "))
    return cli(
        *words, "--yes", *(["--arch", "sm80"] if words[0] == "install" and "--arch" not in words else [])
    )


def states(cli: Cli, vllm: FakeVllm) -> dict[str, str]:
    """File name → state, as `status` has it."""
    found = cli("status", "--target", vllm.site, "--json").document["data"]["files"]
    return {item["path"].removeprefix("vllm/"): item["state"] for item in found}


@pytest.mark.parametrize("left", ["nothing", "a user's file"])
def test_hooks_without_the_package_are_an_error_that_rollback_ends(
    cli: Cli, fake: FakeVllm, left: str
) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    folder = fake.root / "deepinfer_sm80"
    shutil.rmtree(folder)
    if left != "nothing":
        folder.mkdir()
        (folder / "notes.txt").write_bytes(MINE)
    shown = cli("status", "--target", fake.site)
    assert shown.code == 1
    assert "they cannot be imported" in shown.out
    assert f"next: deepinfer rollback --target {fake.site}\n" in shown.err
    assert "\tproblem\tmodified\t" in cli("doctor", "--target", fake.site).out
    done = follow(cli, shown)
    assert done.code == 0
    if left != "nothing":
        assert f"not DeepInfer's, and left where it is: {folder / 'notes.txt'}" in done.err
        shutil.rmtree(folder)
    assert fake.snapshot() == start


def test_edits_of_an_overlay_without_a_record_are_seen(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    gate = fake.root / "deepinfer_sm80" / "gate.py"
    gate.write_bytes(MINE)
    plain = hook.strip(fake.cache_utils.read_bytes())
    fake.cache_utils.write_bytes(hook.append(plain + MINE))
    (fake.root / "deepinfer_sm80" / "ops" / "gather.py").unlink()
    shown = cli("status", "--target", fake.site)
    assert shown.code == 1
    found = states(cli, fake)
    assert found["deepinfer_sm80/gate.py"] == "modified"
    assert found["deepinfer_sm80/ops/gather.py"] == "missing"
    assert found["models/deepseek_v41/common/ops/cache_utils.py"] == "modified"
    assert f"next: deepinfer install --force --target {fake.site}" in shown.err
    assert follow(cli, shown).code == 0
    assert cli("status", "--target", fake.site).code == 0


@pytest.mark.parametrize("hooked", [False, True])
def test_comparing_imports_nothing_heavy(fake_vllm: Callable[..., FakeVllm], hooked: bool) -> None:
    vllm = fake_vllm()
    edited = vllm.cache_utils.read_bytes() + MINE
    vllm.cache_utils.write_bytes(hook.append(edited) if hooked else edited)
    assert heavy_imports("status", "--target", vllm.site) == f"[] {int(hooked)}"


def test_a_users_file_beside_ours_is_not_called_applied(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    (fake.root / "deepinfer_sm80" / "notes.txt").write_bytes(MINE)
    shown = cli("status", "--target", fake.site)
    assert shown.code == 0
    assert "note\tvllm/deepinfer_sm80/notes.txt is not DeepInfer's" in shown.out
    assert "deepinfer_sm80/notes.txt" not in states(cli, fake)
    assert "adopts it" in shown.out
    assert follow(cli, shown).code == 0
    assert cli("verify", "--level", "static", "--target", fake.site).code == 0


def test_a_folder_with_a_users_files_alone_blocks_nothing(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    notes = fake.root / "deepinfer_sm80" / "notes.txt"
    notes.write_bytes(MINE)
    assert cli("rollback", "--target", fake.site, "--yes", "--force").code == 0
    shown = cli("status", "--target", fake.site)
    assert "overlay\tnot-installed" in shown.out
    assert states(cli, fake) == {}
    assert cli("rollback", "--target", fake.site, "--yes").out == "nothing to roll back\n"
    install_into(cli, fake)
    assert "already installed" in install_into(cli, fake).out
    assert cli("verify", "--level", "static", "--target", fake.site).code == 0
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert notes.read_bytes() == MINE


def test_the_drift_that_install_refuses_is_shown(cli: Cli, fake: FakeVllm) -> None:
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + MINE)
    refused = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    assert "error[file-drift]" in refused.err
    assert f"`deepinfer status --target {fake.site}` shows what changed" in refused.err
    shown = cli("status", "--target", fake.site)
    assert shown.code == 0
    path = fake.cache_utils.relative_to(fake.site)
    assert f"modified\t{path}\tnot as in vLLM 0.33.0" in shown.out
    assert follow(cli, shown).code == 0
    assert (
        f"{path} had edits before the install: rollback gives it back with them"
        in cli("status", "--target", fake.site).out
    )


def test_the_plan_of_a_rollback_says_what_becomes_of_an_edit(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + MINE)
    shown = cli("status", "--target", fake.site)
    assert f"hint: deepinfer rollback --force --target {fake.site}\n" in shown.err
    gate = fake.root / "deepinfer_sm80" / "gate.py"
    gate.write_bytes(MINE)
    plan = cli("rollback", "--target", fake.site, "--force", "--dry-run")
    assert "remove\tvllm/deepinfer_sm80/\t4 files\n" in plan.out
    assert "remove\tvllm/deepinfer_sm80/gate.py\tdeleted, with your edit; --force keeps a copy\n" in plan.out
    assert "\tthe original is put back, your edit goes; --force keeps a copy\n" in plan.out
    assert follow(cli, shown).code == 0
    assert MINE not in fake.cache_utils.read_bytes()


def test_the_plan_of_a_rollback_puts_a_deleted_file_back(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    fake.cache_utils.unlink()
    plan = cli("rollback", "--target", fake.site, "--dry-run")
    assert "cache_utils.py\tthe original is put back\n" in plan.out


def test_a_stale_record_says_nothing_of_the_vllm_that_is_there(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    fake.reinstall("0.30.0")
    assert "match\tsupported (vLLM 0.30.0)\n" in cli("status", "--target", fake.site).out


def test_symbols_are_named_with_the_folder_that_is_there(cli: Cli, fake: FakeVllm) -> None:
    fake.cache_utils.write_text("BYTES_PER_TOKEN = 1\n")
    fake.rocm.write_text("")
    fake.reinstall_record()
    shown = cli("status", "--target", fake.site)
    (row,) = [line for line in shown.out.splitlines() if line.startswith("match\t")]
    assert "symbols differ from vLLM 0.33.0: models/deepseek_v41/" in row
    assert row.endswith(", …")
    everything = cli("status", "--target", fake.site, "--json").document["data"]["match"]["differing"]
    assert len(everything) > 3
    refused = cli("install", "--target", fake.site, "--arch", "sm80", "--json")
    assert "{layout}" not in shown.out + refused.out + refused.err


def test_a_damaged_backup_is_noted(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer" / "backups")
    shown = cli("status", "--target", fake.site)
    assert shown.code == 0
    assert "cache_utils.py is missing or damaged" in shown.out


def test_rollback_after_an_uninstall_speaks_of_an_uninstall(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    for path in [*fake.root.iterdir(), *fake.site.glob("*.dist-info")]:
        if path.name != "deepinfer_sm80":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = cli("rollback", "--target", fake.site, "--yes")
    assert "vLLM was uninstalled since" in done.out
    assert "upgraded" not in done.out


LINES = hook.block().splitlines(keepends=True)
# which of the block's lines are gone: every choice but none and all
DAMAGES = [[n for n in range(4) if bits >> n & 1] for bits in range(1, 15)]


@pytest.mark.parametrize("way", ["rollback", "install first"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("gone", DAMAGES, ids=str)
def test_no_line_of_a_damaged_block_outlives_the_package(
    cli: Cli, fake: FakeVllm, gone: list[int], recorded: bool, way: str
) -> None:
    original = fake.cache_utils.read_bytes()
    install_into(cli, fake)
    content = fake.cache_utils.read_bytes()
    for number in gone:
        content = content.replace(LINES[number], b"")
    fake.cache_utils.write_bytes(content)
    if not recorded:
        shutil.rmtree(fake.site / ".deepinfer")
    assert cli("status", "--target", fake.site).code == 1
    force = ["--force"] if recorded else []
    if way == "install first":
        assert cli("install", "--target", fake.site, "--arch", "sm80", "--yes", "--force").code == 0
        force = []
    done = cli("rollback", "--target", fake.site, "--yes", *force)
    assert done.code == 0, done.err
    assert fake.cache_utils.read_bytes() == original
    assert not (fake.root / "deepinfer_sm80").exists()


def test_an_edit_inside_the_block_is_no_line_of_ours(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    edited = fake.cache_utils.read_bytes().replace(LINES[1], LINES[1] + MINE)
    fake.cache_utils.write_bytes(edited)
    shutil.rmtree(fake.site / ".deepinfer")
    assert cli("rollback", "--target", fake.site, "--yes", "--force").code == 4
    assert fake.cache_utils.read_bytes() == edited
