"""`deepinfer install` on small vLLMs: plan, confirmation, dry run, upgrade, adopt, partial, force, recovery."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.commands import livecheck
from deepinfer_cli.detect import process, wheel
from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.overlay import engine, hook
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.record import read_record
from tests.cli.conftest import Cli, Run, install_into, use_payload
from tests.conftest import FakeVllm

CACHE_UTILS = "vllm/models/deepseek_v41/common/ops/cache_utils.py"


def test_install_shows_the_plan_and_says_what_it_did(cli: Cli, fake: FakeVllm) -> None:
    run = install_into(cli, fake)
    files = payloads.bundled().files
    amount = sum(len(payloads.bundled().read(name)) for name in files)
    assert run.out.splitlines() == [
        "Op\tGroup\tInstall\tReason",
        "gather\taccelerate\tyes\tequal to vLLM 0.33.0",
        "combine\taccelerate\tyes\tequal to vLLM 0.33.0",
        "Action\tPath\tWhat",
        f"add\tvllm/deepinfer_sm80/\t{len(files)} files, {amount} B",
        f"replace\t{CACHE_UTILS}\tfour marked lines at its end",
        "for sm80 (--arch sm80)",
        "supported (vLLM 0.33.0)",
        f"installed overlay 0.1.0 in {fake.root}: 5 files added, 1 file edited",
        run.out.splitlines()[-1],
    ]
    assert run.out.splitlines()[-1].startswith("not checked that the ops are bound: ")
    assert run.err.splitlines()[-1] == f"next: deepinfer verify --target {fake.site}"
    assert hook.find(fake.cache_utils.read_bytes())
    record = read_record(fake.target().state_dir)
    assert record is not None
    assert record.arch == ("sm80",)


def test_the_chosen_vllm_is_named_on_stderr(cli: Cli, fake: FakeVllm) -> None:
    assert f"vLLM 0.33.0 in {fake.root} (" in install_into(cli, fake).err


def test_verbose_lists_every_file(cli: Cli, fake: FakeVllm) -> None:
    out = cli("install", "--target", fake.site, "--arch", "sm80", "--dry-run", "-v").out
    assert "add\tvllm/deepinfer_sm80/gate.py\t" in out


def test_a_second_install_is_already_installed(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    before = fake.snapshot()
    run = install_into(cli, fake)
    assert run.out == "already installed: overlay 0.1.0, gather and combine\n"
    assert fake.snapshot() == before
    assert cli("install", "--target", fake.site, "--arch", "sm80", "--json").document["data"][
        "already_installed"
    ]


def test_other_architectures_than_recorded_are_written_down_and_said(cli: Cli, fake: FakeVllm) -> None:
    def install(*more: str) -> Run:
        return cli("install", "--target", fake.site, "--yes", *more)

    def recorded() -> list[str]:
        return cli("status", "--target", fake.site, "--json").document["data"]["archs"]

    install_into(cli, fake)
    dry = install("--arch", "sm86", "--dry-run")
    assert dry.out.splitlines()[1:] == [
        "it would be recorded as installed for sm86, before for sm80; no other file changes"
    ]
    assert recorded() == ["sm80"]
    done = install("--arch", "sm86")
    assert done.out.splitlines() == [
        "already installed: overlay 0.1.0, gather and combine",
        "it is now recorded as installed for sm86, before for sm80; no other file changes",
    ]
    assert recorded() == ["sm86"]
    assert install("--arch", "sm86").out == "already installed: overlay 0.1.0, gather and combine\n"
    data = install("--arch", "sm80", "--json").document["data"]
    assert (data["already_installed"], data["archs"], data["archs_before"]) == (True, ["sm80"], ["sm86"])


def test_without_a_terminal_and_yes_it_writes_nothing_and_is_exit_2(cli: Cli, fake: FakeVllm) -> None:
    before = fake.snapshot()
    run = cli("install", "--target", fake.site, "--arch", "sm80")
    assert run.code == 2
    assert "error[confirmation-required]" in run.err
    assert "--yes" in run.err
    assert f"replace\t{CACHE_UTILS}" in run.out
    assert fake.snapshot() == before
    document = cli("install", "--target", fake.site, "--arch", "sm80", "--json").document
    assert document["errors"][0]["code"] == "confirmation-required"
    assert fake.snapshot() == before


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("verb", ["install", "rollback"])
def test_a_dry_run_shows_the_real_plan_and_writes_nothing(
    cli: Cli, fake: FakeVllm, verb: str, installed: bool
) -> None:
    if installed:
        install_into(cli, fake)
    before = fake.snapshot()
    arch = ["--arch", "sm80"] if verb == "install" else []
    run = cli(verb, "--target", fake.site, *arch, "--dry-run")
    document = cli(verb, "--target", fake.site, *arch, "--dry-run", "--json").document
    assert run.code == 0
    assert fake.snapshot() == before
    assert document["data"]["dry_run"] is True
    if installed != (verb == "rollback"):
        assert run.out.splitlines()[-1] in (
            "already installed: overlay 0.1.0, gather and combine",
            "nothing to roll back",
        )
        return
    assert run.out.splitlines()[-1] == "dry run: nothing was written; 6 files would change"
    changes = document["data"]["plan"]["changes"] if verb == "install" else document["data"]["changes"]
    cli(verb, "--target", fake.site, *arch, "--yes")
    for change in changes:
        path = fake.site / change["path"]
        now = payloads.sha256(path.read_bytes()) if path.exists() else None
        assert now == change["after_sha256"]


@pytest.mark.parametrize(
    ("cards", "archs", "warnings"),
    [
        pytest.param([(8, 0)], ["sm80"], 0, id="a100"),
        pytest.param([(8, 6), (8, 9)], ["sm86", "sm89"], 0, id="two-kinds"),
        pytest.param([(8, 0), (9, 0)], ["sm80"], 1, id="mixed"),
    ],
)
def test_the_gpus_decide_the_architectures(
    cli: Cli,
    fake: FakeVllm,
    gpus: Callable[..., None],
    cards: list[tuple[int, int]],
    archs: list[str],
    warnings: int,
) -> None:
    gpus(*cards)
    run = cli("install", "--target", fake.site, "--yes", "--no-verify", "--json")
    assert run.document["data"]["archs"] == archs
    assert run.err.count("is ignored: sm90 is newer") == warnings


def test_arch_with_another_gpu_present_warns(cli: Cli, fake: FakeVllm, gpus: Callable[..., None]) -> None:
    gpus((8, 0))
    run = cli("install", "--target", fake.site, "--arch", "sm86", "--dry-run")
    assert "warning: --arch sm86, but GPU 0 of this machine is NVIDIA Card (sm80)" in run.err


def test_an_upgrade_for_another_architecture_says_both(
    cli: Cli,
    fake: FakeVllm,
    fake_payload: Callable[..., payloads.Payload],
    fake_manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_into(cli, fake)
    use_payload(fake_payload("0.2.0"), fake_manifest, monkeypatch)
    run = cli("install", "--target", fake.site, "--arch", "sm86", "--yes")
    assert "it is now recorded as installed for sm86, before for sm80\n" in run.out
    use_payload(fake_payload("0.3.0"), fake_manifest, monkeypatch)
    assert "recorded as" not in cli("install", "--target", fake.site, "--arch", "sm86", "--yes").out


def test_an_older_overlay_is_upgraded_in_one_install(
    cli: Cli,
    fake: FakeVllm,
    fake_payload: Callable[..., payloads.Payload],
    fake_manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    use_payload(fake_payload("0.2.0", extra={"new.py": ""}, without=("gate.py",)), fake_manifest, monkeypatch)
    run = install_into(cli, fake)
    assert "upgrades overlay 0.1.0 to 0.2.0" in run.out
    assert (fake.root / "deepinfer_sm80" / "new.py").exists()
    assert not (fake.root / "deepinfer_sm80" / "gate.py").exists()
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.snapshot() == start


def test_an_overlay_without_a_record_is_adopted(cli: Cli, fake: FakeVllm) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    assert cli("status", "--target", fake.site, "--json").document["data"]["state"] == "unrecorded"
    run = install_into(cli, fake)
    assert f"adopted overlay 0.1.0 in {fake.root}: nothing to write" in run.out
    assert cli("status", "--target", fake.site, "--json").document["data"]["state"] == "installed"
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.snapshot() == start


def test_one_changed_symbol_is_refused_by_name_and_partial_installs_the_rest(
    cli: Cli, fake: FakeVllm
) -> None:
    text = fake.cache_utils.read_text(encoding="utf-8")
    fake.cache_utils.write_text(
        text.replace("return topk + window", "return topk - window"), encoding="utf-8"
    )
    fake.reinstall_record()
    start = fake.snapshot()
    run = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    assert run.code == 3
    assert "error[vllm-version-unsupported]" in run.err
    assert "combine_indices (changed)" in run.err
    assert "--partial installs the ops that fit: gather" in run.err
    assert fake.snapshot() == start
    partial = install_into(cli, fake, "--partial")
    assert "combine\taccelerate\tno\t" in partial.out
    assert "op combine is left to stock" in partial.err
    status = cli("status", "--target", fake.site)
    assert "left to stock\tcombine" in status.out
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.snapshot() == start


def test_an_edited_file_is_refused_and_force_keeps_a_copy(cli: Cli, fake: FakeVllm) -> None:
    edited = fake.cache_utils.read_bytes() + b"EXTRA = 1\n"
    fake.cache_utils.write_bytes(edited)
    run = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    assert run.code == 4
    assert "error[file-drift]" in run.err
    assert str(CACHE_UTILS) in run.err
    forced = install_into(cli, fake, "--force", "--json")
    kept = [Path(path) for path in forced.document["data"]["kept"]]
    assert [path.read_bytes() for path in kept] == [edited]
    assert "warning: your edited file was kept as " in forced.err
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.cache_utils.read_bytes() == edited


@pytest.fixture
def interrupted(cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """A vLLM whose install was killed in the middle."""

    class Killed(BaseException):
        pass

    install_into(cli, fake)
    record = json.loads((fake.site / ".deepinfer" / "record.json").read_text())
    cli("rollback", "--target", fake.site, "--yes")
    journal = {
        "schema_version": 1,
        "kind": "install",
        "transaction_id": "0123456789ab",
        "created_at": record["created_at"],
        "operations": [
            {"path": "vllm/deepinfer_sm80/gate.py", "owner": "payload", "before_sha256": None,
             "after_sha256": payloads.sha256(b"x"), "backup": None}
        ],
        "made_dirs": ["vllm/deepinfer_sm80"],
        "dropped_dirs": [],
        "copies": {},
        "kept_dir": ".deepinfer-kept-x",
        "record_before": None,
        "record_after": record,
    }  # fmt: skip
    (fake.site / ".deepinfer").mkdir()
    (fake.site / ".deepinfer" / "journal.json").write_text(json.dumps(journal))
    (fake.root / "deepinfer_sm80").mkdir()
    (fake.root / "deepinfer_sm80" / "gate.py").write_bytes(b"x")
    return fake


def test_readers_only_report_an_interrupted_install(cli: Cli, interrupted: FakeVllm) -> None:
    before = interrupted.snapshot()
    for command in (
        ["status"],
        ["doctor"],
        ["verify", "--level", "static"],
        ["install", "--arch", "sm80", "--dry-run"],
        ["rollback", "--dry-run"],
        ["export", "patch"],
    ):
        run = cli(*command, "--target", interrupted.site)
        assert run.code == 1, command
        assert "interrupted" in run.err + run.out
        assert interrupted.snapshot() == before
    assert (
        "`deepinfer rollback --target"
        in cli("install", "--arch", "sm80", "--dry-run", "--target", interrupted.site).err
    )


@pytest.mark.parametrize("verb", ["install", "rollback"])
def test_writers_recover_first_and_say_so(cli: Cli, interrupted: FakeVllm, verb: str) -> None:
    arch = ["--arch", "sm80"] if verb == "install" else []
    run = cli(verb, "--target", interrupted.site, *arch, "--yes", "--json")
    assert run.code == 0
    assert run.document["data"]["recovered"] == "an interrupted install was found and undone"
    assert "warning: an interrupted install was found and undone" in run.err
    wanted = "installed" if verb == "install" else "not-installed"
    assert cli("status", "--target", interrupted.site, "--json").document["data"]["state"] == wanted


def test_ctrl_c_restores_and_is_130(cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    start = fake.snapshot()
    seen: list[str] = []

    def stop(name: str) -> None:
        seen.append(name)
        if len(seen) == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_step", stop)
    run = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    assert len(seen) >= 12
    assert run.code == 130
    assert run.err.splitlines()[-2:] == [
        "error[interrupted]: interrupted; the overlay is not installed, and no file of it is left",
        f"hint: deepinfer status --target {fake.site}",
    ]
    assert fake.snapshot() == start


def test_quiet_leaves_the_results(cli: Cli, fake: FakeVllm) -> None:
    run = install_into(cli, fake, "--quiet")
    assert run.out.startswith("installed overlay 0.1.0 in ")
    assert run.err == ""
    run = cli("rollback", "--target", fake.site, "--yes", "--quiet")
    assert (run.out, run.err) == ("rolled back: 1 file restored, 5 files removed\n", "")
    # there the plan is the result
    assert "Action\tPath" in cli("install", "--target", fake.site, "--arch", "SM80", "--dry-run", "-q").out


def test_a_dry_run_lists_the_caches_that_would_be_cleared(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tmp_path / "triton" / ("A" * 52)
    entry.mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(entry.parent))
    install_into(cli, fake)
    run = cli("install", "--target", fake.site, "--arch", "sm80", "--dry-run", "--clear-caches")
    assert f"Triton\t0 B\t{entry.parent}" in run.out
    assert entry.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_after_the_work_says_that_it_is_done(
    cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def interrupt(*_: object) -> list[object]:
        os.kill(os.getpid(), number)
        return []

    handler = signal.signal(number, lambda *_: None)
    try:
        monkeypatch.setattr(process, "running", interrupt)
        run = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
        assert run.code == 130
        assert "error[interrupted]: interrupted; the overlay is installed, every file of it\n" in run.err
        assert cli("status", "--target", fake.site, "--json").document["data"]["state"] == "installed"
        run = cli("rollback", "--target", fake.site, "--yes")
        assert run.code == 130
        assert "interrupted; the overlay is not installed, and no file of it is left\n" in run.err
    finally:
        signal.signal(number, handler)


def test_wheel_unpacks_a_tree_and_a_second_run_finds_it(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    into = tmp_path / "new" / "tree"
    arguments = ["install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes"]
    first = cli(*arguments)
    assert first.code == 0
    assert first.err.splitlines()[-1] == f"next: deepinfer verify --target {into}"
    second = cli(*arguments)
    assert second.code == 0
    assert second.out.startswith("already installed")
    other = cli("install", "--wheel", "0.30.0", "--into", into, "--arch", "sm80", "--yes")
    assert other.code == 4
    assert "holds vLLM 0.33.0, not 0.30.0" in other.err


def test_wheel_refuses_a_folder_with_other_things(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    run = cli("install", "--wheel", "0.33.0", "--into", tmp_path, "--arch", "sm80", "--yes")
    assert run.code == 4
    assert "error[into-not-empty]" in run.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_running_vllm_must_be_restarted(cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "running", lambda root: (process.Process(4242, "VLLM::EngineCore"),))
    run = install_into(cli, fake)
    assert "restart vLLM: process 4242 still runs the old code" in run.out
    assert "restart vLLM: process 4242" in cli("rollback", "--target", fake.site, "--yes").out


def test_the_child_process_check_says_what_it_found() -> None:
    answer = {
        "ok": True,
        "problems": [],
        "error": None,
        "report": {"bound": [{"op": "gather"}, {"op": "gather"}]},
    }
    assert livecheck.read(answer).sentence == "checked in a child process: gather bound"
    refused = answer | {"error": {"kind": "BindError", "message": "unknown signature", "stage": "bind"}}
    assert livecheck.read(refused).failed
    assert "unknown signature" in livecheck.read(refused).sentence
    off = answer | {"report": {"bound": [], "enabled": False}, "problems": ["the overlay is off here"]}
    assert not livecheck.read(off).failed
    assert "DEEPINFER_DISABLE" in livecheck.read(off).sentence
    broken = answer | {"error": {"kind": "ImportError", "message": "no torch", "stage": "import"}}
    assert not livecheck.read(broken).failed
    assert "this vLLM cannot be imported here (ImportError: no torch)" in livecheck.read(broken).sentence


def test_a_bind_failure_is_exit_1_and_names_rollback(
    cli: Cli, fake: FakeVllm, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((8, 0))
    failed = livecheck.Check("not bound: op gather is not bound", True, {"checked": True})
    monkeypatch.setattr(livecheck, "check", lambda *_: failed)
    run = cli("install", "--target", fake.site, "--yes")
    assert run.code == 1
    assert "error[not-bound]" in run.err
    assert f"hint: deepinfer rollback --target {fake.site}" in run.err


def test_the_check_is_not_made_without_a_served_gpu_or_interpreter(fake: FakeVllm, cli: Cli) -> None:
    install_into(cli, fake)
    record = read_record(fake.target().state_dir)
    assert record is not None
    check = livecheck.check(fake.target(), record, GpuReport())
    assert not check.checked
    assert "interpreter" in check.sentence
