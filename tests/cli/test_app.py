"""Help, version, usage errors, the error boundary and the JSON envelope."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deepinfer_sm80
import pytest

from deepinfer_cli.commands import install, status
from deepinfer_cli.errors import FailedError
from tests.cli.conftest import Cli
from tests.conftest import FakeVllm

VERBS = ["install", "rollback", "status", "verify", "bench", "doctor"]
COMMANDS = [*([verb] for verb in VERBS), ["export", "patch"], ["export", "tree"], ["export", "docker"]]
HEAVY = {"torch", "triton", "tilelang", "vllm", "git", "rich", "numpy"}


def deepinfer(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    """A real process."""
    command = [sys.executable, "-m", "deepinfer_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_examples_and_the_shared_options(
    cli: Cli, command: list[str], flag: str
) -> None:
    run = cli(*command, flag)
    assert run.code == 0
    assert run.err == ""
    assert f"Usage: deepinfer {' '.join(command)} [OPTIONS]" in run.out
    assert "Examples:" in run.out
    assert f"deepinfer {' '.join(command)}" in run.out.split("Examples:")[1]
    for option in ("--target", "--python", "--json", "--quiet", "--verbose", "--no-color", "--debug"):
        assert option in run.out


@pytest.mark.parametrize("verb", ["install", "rollback"])
def test_the_writers_have_dry_run_yes_and_force(cli: Cli, verb: str) -> None:
    out = cli(verb, "--help").out
    for option in ("--dry-run", "--yes", "--force"):
        assert option in out


def test_help_lists_every_command_whole(cli: Cli) -> None:
    run = cli("--help")
    assert run.code == 0
    assert "..." not in run.out.split("Commands:")[1].split("Examples:")[0]
    for verb in (*VERBS, "export"):
        assert f"\n  {verb}" in run.out
    assert cli().out == run.out


def test_version_is_one_line(cli: Cli) -> None:
    run = cli("--version")
    assert (run.code, run.out, run.err) == (0, f"{deepinfer_sm80.__version__}\n", "")


def test_python_m_runs_it() -> None:
    done = deepinfer("--version")
    assert (done.returncode, done.stdout) == (0, f"{deepinfer_sm80.__version__}\n")


def test_shell_completion_is_there() -> None:
    env = {
        **os.environ,
        "_DEEPINFER_COMPLETE": "complete_bash",
        "COMP_WORDS": "deepinfer ro",
        "COMP_CWORD": "1",
    }
    code = "import sys; from deepinfer_cli.app import app; app(prog_name='deepinfer')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "rollback"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        pytest.param(["nope"], "no such command", "deepinfer --help", id="command"),
        pytest.param(["status", "--nope"], "no such option: --nope", "deepinfer status --help", id="option"),
        pytest.param(["install", "--arch"], "requires an argument", "deepinfer install --help", id="value"),
        pytest.param(["export"], "missing command", "deepinfer export --help", id="subcommand"),
        pytest.param(
            ["export", "tree"], "missing option '--into'", "deepinfer export tree --help", id="required"
        ),
        pytest.param(["status", "--target", ""], "'--target': is empty", "status --help", id="empty"),
        pytest.param(["verify", "--output="], "is empty", "deepinfer verify --help", id="empty-output"),
        pytest.param(["verify", "--timeout", "-1"], "--timeout", "deepinfer verify --help", id="negative"),
        pytest.param(["bench", "--timeout", "nan"], "--timeout", "deepinfer bench --help", id="nan"),
        pytest.param(["bench", "--threshold", "-1"], "--threshold", "bench --help", id="threshold"),
        pytest.param(["verify", "--max-smem", "-1"], "--max-smem", "verify --help", id="max-smem"),
        pytest.param(
            ["install", "--wheel", "0.33.0", "--arch", "sm80"], "--wheel and --into", "--into DIR", id="pair"
        ),
    ],
)
def test_usage_errors_are_exit_2(cli: Cli, arguments: list[str], message: str, hint: str) -> None:
    run = cli(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert run.err.startswith("error[usage]: ")
    assert message in run.err
    assert hint in run.err
    document = cli(arguments[0], "--json", *arguments[1:]).document
    assert (document["status"], document["exit_code"], document["errors"][0]["code"]) == ("error", 2, "usage")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan --context 2M", "'--context': it must be a whole number"),
        ("plan --gpus eight", "'--gpus': it must be a whole number"),
        ("doctor --tp 1.5", "'--tp': it must be a whole number"),
        ("verify --timeout soon", "'--timeout': it must be a number"),
        ("plan --gpu-memory x", "'--gpu-memory': it must be a number"),
        ("plan --gpus 0", "'--gpus': it must be 1 or more"),
        ("verify --timeout 0", "'--timeout': it must be 0.001 or more"),
        ("plan --engram disk", "'--engram': 'disk' is not one of 'host', 'gpu'"),
    ],
)
def test_a_value_that_is_none_is_told_in_plain_words(cli: Cli, arguments: str, said: str) -> None:
    run = cli(*arguments.split())
    assert (run.code, run.err.splitlines()[0]) == (2, f"error[usage]: invalid value for {said}")


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ("Invalid value for '--gpus': '2M' is not a valid integer range.", "it must be a whole number"),
        ("Invalid value for '--seed': 'a b' is not a valid integer.", "it must be a whole number"),
        ("Invalid value for '--timeout': 'x' is not a valid float range.", "it must be a number"),
        ("Invalid value for '--gpus': 0 is not in the range x>=1.", "it must be 1 or more"),
        ("Invalid value for '--port': 70000 is not in the range 1<=x<=65534.", "it must be 1 to 65534"),
        ("Invalid value for '--tp': Input should be less than or equal to 8", "it must be 8 or less"),
    ],
)
def test_whichever_typer_said_it(said: str, plain: str) -> None:
    from deepinfer_cli import app

    assert app._plain(said) == f"{said.partition(': ')[0]}: {plain}"


def test_no_vllm_is_exit_3_with_the_way_on(cli: Cli, tmp_path: Path) -> None:
    run = cli("status", "--target", tmp_path)
    assert run.code == 3
    assert run.out == ""
    assert run.err.startswith("error[vllm-not-found]: ")
    assert "\nhint: " in run.err


def test_no_vllm_anywhere_names_the_wheel_and_fetches_nothing(cli: Cli) -> None:
    run = cli("install", "--arch", "sm80", "--yes", "--python", sys.executable)
    if "vllm-not-found" not in run.err:
        pytest.skip("this Python has a vLLM")
    assert run.code == 3
    assert "deepinfer install --wheel 0.33.0 --into DIR" in run.err


def test_no_gpu_is_exit_3_and_names_arch(cli: Cli, fake: FakeVllm) -> None:
    run = cli("install", "--target", fake.site, "--yes")
    assert run.code == 3
    assert "error[gpu-not-found]" in run.err
    assert "--arch sm80" in run.err


def test_early_failures_speak_json_too(cli: Cli, tmp_path: Path) -> None:
    for verb in VERBS[:-1]:
        document = cli(verb, "--target", tmp_path / "nothing", "--json").document
        assert set(document) == {"schema_version", "command", "status", "exit_code", "data", "errors"}
        assert document["schema_version"] == 1
        assert document["command"] == verb
        assert document["status"] == "error"
        assert document["exit_code"] == 3
        assert set(document["errors"][0]) == {"code", "message", "hint", "paths"}


def test_an_unexpected_error_says_how_to_get_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(status, "run", broken)
    run = cli("status")
    assert run.code == 1
    assert run.err == (
        "error[unexpected]: RuntimeError: two lines\n"
        "hint: this is a bug in DeepInfer: run it again with --debug and report the traceback\n"
    )
    assert "Traceback" in cli("status", "--debug").err
    assert cli("status", "--json").document["errors"][0]["code"] == "unexpected"


def test_a_missing_package_is_no_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(status, "run", broken)
    name = "gitdb.db"
    run = cli("status")
    assert run.code == 1
    assert run.err.startswith(
        "error[missing-package]: ModuleNotFoundError: No module named 'gitdb.db'\nhint: this Python"
    )
    name = "deepinfer_cli.detect.gone"
    assert cli("status", "--json").document["errors"][0]["code"] == "unexpected"


def test_expected_errors_have_no_traceback_without_debug(cli: Cli, tmp_path: Path) -> None:
    assert "Traceback" not in cli("status", "--target", tmp_path).err
    assert "Traceback" in cli("status", "--target", tmp_path, "--debug").err


def test_ctrl_c_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "run", interrupted)
    run = cli("status")
    assert (run.code, run.out, run.err) == (130, "", "error[interrupted]: interrupted\n")
    assert cli("status", "--json").document["exit_code"] == 130


def test_error_paths_are_one_per_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise FailedError("it broke", code="broke", hint="mend it", paths=("a b", "[c]"))

    monkeypatch.setattr(install, "run", failing)
    assert cli("install").err == "error[broke]: it broke\n  a b\n  [c]\nhint: mend it\n"


@pytest.mark.release
def test_a_closed_pipe_is_quiet_and_does_not_stop_the_command(real_release: Callable[..., Path]) -> None:
    site = real_release("0.33.0")
    command = f"{sys.executable} -m deepinfer_cli install --target '{site}' --arch sm80 --yes | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert deepinfer("status", "--target", site).returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_stop_the_command(real_release: Callable[..., Path], closed: str) -> None:
    site = real_release("0.33.0")
    command = f"{sys.executable} -m deepinfer_cli install --target '{site}' --arch sm80 --yes {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert deepinfer("status", "--target", site).returncode == 0


@pytest.mark.parametrize("json", ["", "--json"])
def test_a_full_disk_under_the_output_is_said(real_release: Callable[..., Path], json: str) -> None:
    command = (
        f"{sys.executable} -m deepinfer_cli status --target '{real_release('0.33.0')}' {json} > /dev/full"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error[io-error]: the output cannot be written: No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", ["", "--json", "--dry-run", "--quiet"])
@pytest.mark.parametrize("stream", [">", "2>", ">&"])
def test_the_work_is_done_whatever_becomes_of_the_output(
    real_release: Callable[..., Path], options: str, stream: str
) -> None:
    site = real_release("0.33.0")

    def broken(command: str) -> tuple[int, str]:
        line = f"{sys.executable} -m deepinfer_cli {command} --target '{site}' {options} {stream} /dev/full"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        return done.returncode, done.stderr

    code, said = broken("install --arch sm80 --yes")
    assert code == (0 if stream == "2>" else 1)
    assert stream != ">" or "error[io-error]: the output cannot be written" in said
    assert (site / ".deepinfer" / "record.json").exists() == (options != "--dry-run")
    assert broken("rollback --yes")[0] == (0 if stream == "2>" else 1)
    assert not (site / ".deepinfer").exists()
    assert not (site / "vllm" / "deepinfer_sm80").exists()


@pytest.mark.parametrize(
    "command", ["--help", "--version", "status --help", "status --debug --target /nowhere"]
)
def test_output_that_cannot_be_written_leaves_no_traceback(command: str) -> None:
    line = f"{sys.executable} -m deepinfer_cli {command} > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode in {1, 3}
    assert "Exception ignored" not in done.stderr
    assert done.stderr.startswith("Traceback") == ("--debug" in command)


@pytest.mark.parametrize("verb", ["install", "verify", "bench"])
def test_an_architecture_means_the_same_everywhere(cli: Cli, fake: FakeVllm, verb: str) -> None:
    for name, code, error in (
        ("sm90", 3, "arch-unsupported"),
        ("SM_90", 3, "arch-unsupported"),
        ("x", 2, "arch-unknown"),
    ):
        run = cli(verb, "--target", fake.site, "--arch", name)
        assert (run.code, run.err.startswith(f"error[{error}]")) == (code, True)


@pytest.mark.parametrize("verb", ["install", "verify", "status"])
def test_an_interpreter_that_is_none_is_refused_beside_a_target_too(
    cli: Cli, fake: FakeVllm, verb: str
) -> None:
    run = cli(
        verb,
        "--target",
        fake.site,
        "--python",
        "/bin/true",
        *(["--arch", "sm80"] if verb == "install" else []),
    )
    assert run.code == 3
    assert "error[python-unusable]" in run.err
    # what takes it out needs none
    assert cli("rollback", "--target", fake.site, "--python", "/bin/true", "--yes").code == 0


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_a_result_file_that_cannot_be_written_is_said_before_the_work(
    cli: Cli, fake: FakeVllm, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "file").write_text("")
    run = cli(verb, "--target", fake.site, "--output", tmp_path / "file" / "x.json")
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("error[write-failed]: cannot write: Not a directory")
    assert cli(verb, "--target", fake.site, "--output", tmp_path).code == 2


def test_a_baseline_that_is_not_there_says_what_it_should_be(cli: Cli, tmp_path: Path) -> None:
    run = cli("bench", "--baseline", tmp_path / "x")
    assert run.code == 1
    assert run.err.splitlines() == [
        "error[result-unreadable]: the result file cannot be read: No such file or directory",
        f"  {tmp_path / 'x'}",
        "hint: name a file that `deepinfer bench --output FILE` wrote",
    ]


def test_a_file_that_cannot_be_read_is_no_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/opt/vllm/.deepinfer/record.json")

    monkeypatch.setattr(status, "run", broken)
    run = cli("status")
    assert run.code == 1
    assert run.err.splitlines()[:2] == [
        "error[io-error]: a file or folder cannot be used: Permission denied",
        "  /opt/vllm/.deepinfer/record.json",
    ]
    assert "Traceback" in cli("status", "--debug").err


def heavy_imports(*arguments: object) -> str:
    """What a command imports that it must not, and its exit code."""
    code = (
        "import sys; from deepinfer_cli.app import main; code = main(sys.argv[1:]); "
        f"print(sorted({HEAVY!r} & set(sys.modules)), code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["--help", "--version", "install --help", "verify --help"])
def test_help_and_version_import_nothing_heavy(command: str) -> None:
    assert heavy_imports(*command.split()) == "[] 0"


@pytest.mark.release
@pytest.mark.parametrize("installed", [False, True])
def test_status_imports_nothing_heavy(real_release: Callable[..., Path], installed: bool) -> None:
    site = real_release("0.33.0")
    if installed:
        assert deepinfer("install", "--target", site, "--arch", "sm80", "--yes").returncode == 0
    assert heavy_imports("status", "--target", site) == "[] 0"


def test_status_of_a_checkout_imports_no_git(fake_vllm: Callable[..., FakeVllm]) -> None:
    assert heavy_imports("status", "--target", fake_vllm(checkout=True).site) == "[] 0"


def test_names_the_terminal_cannot_show_do_not_end_the_command(
    fake_vllm: Callable[..., FakeVllm], tmp_path: Path
) -> None:
    site = tmp_path / "vLLM \u2014 d\u00e9j\u00e0"
    fake_vllm(site)
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = deepinfer("status", "--target", site, env=env)
    assert done.returncode == 0
    assert "vLLM \\u2014" in done.stdout


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_after_the_end_changes_no_exit_code(name: str) -> None:
    code = (
        "import atexit, os, signal, sys; from deepinfer_cli import entry; sys.argv = ['deepinfer', '--version']; "
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{name})); entry.entry()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
