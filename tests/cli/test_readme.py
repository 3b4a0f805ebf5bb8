"""The README says what the code does: every error code with its exit code, every command, every switch."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli import errors
from deepinfer_cli.errors import DeepInferError, ExitCode
from tests.cli.conftest import Cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# a bug of ours or a damaged DeepInfer: the message is all there is to know
INTERNAL = {"payload-missing", "manifest-invalid", "plan-mismatch", "compile-failed", "backup-failed"}


def raised() -> dict[str, int]:
    """Error code → exit code, from every place that makes an error of ours."""
    kinds = {
        name: int(kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, DeepInferError)
    }
    found = {}
    for path in (ROOT / "deepinfer_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Name)
                or node.func.id not in kinds
            ):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    found[str(keyword.value.value)] = kinds[node.func.id]
    return found


def documented() -> dict[str, int]:
    """Error code → exit code, from the README's table."""
    rows = re.findall(r"^\| (`[a-z`, -]+`) \| (\d+) \|", README, re.MULTILINE)
    return {code: int(exit_code) for codes, exit_code in rows for code in re.findall(r"`([a-z-]+)`", codes)}


def test_every_error_code_is_documented_with_its_exit_code() -> None:
    table = documented()
    wrong = {code: exit_code for code, exit_code in raised().items() if table.get(code) != exit_code}
    assert {code for code in wrong if code not in INTERNAL} == set()


def reported() -> set[str]:
    """Error codes in results: of what a command found, not of what stopped it."""
    found = set()
    for path in (ROOT / "deepinfer_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ErrorItem" and node.args:
                found |= {
                    str(each.value) for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)
                }
    return found


def test_every_code_of_a_result_is_documented() -> None:
    assert {
        code for code in reported() if re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
    } - documented().keys() == set()


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_documented(code: ExitCode) -> None:
    assert re.search(rf"^\| {int(code)} \| ", README, re.MULTILINE)


def test_the_three_switches_are_documented() -> None:
    gate = (ROOT / "overlays" / "deepinfer_sm80" / "gate.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"(DEEPINFER_[A-Z_]+)"', gate))
    assert len(names) == 3
    assert all(f"| `{name}=" in README for name in names)


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
            assert "://" in link or (document.parent / link).exists(), (document.name, link)


def test_no_command_in_the_documents_has_an_unknown_option() -> None:
    from deepinfer_cli import app

    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = document.read_text(encoding="utf-8")
        for line in re.findall(r"^(?:\$ )?deepinfer ([a-z][^#\n`|]*)", text, re.MULTILINE):
            words = [word for word in line.split("   ")[0].split() if word not in {"…"}]
            assert app.main([*words, "--help"]) == 0, line


def lines_of(text: str) -> set[str]:
    """Lines as they can be compared: a table's cells by TAB, no rules and titles, no times, dates and sizes."""
    kept = set()
    for line in text.splitlines():
        line = re.sub(r"(?:\t| {2,})+", "\t", line.strip())
        line = re.sub(r"\d{4}-\d\d-\d\dT\S+|\d+(?:\.\d+)? (?:s|B|kB|MB)\b", "N", line)
        if line.strip("─ ") and line not in {"Ops", "Files", "Compile gate"}:
            kept.add(line)
    return kept


@pytest.mark.release
def test_the_output_shown_is_what_the_commands_print(
    cli: Cli,
    tmp_path: Path,
    pristine_release: Callable[[str], Path],
    user_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pristine_release("0.33.0")
    # the release was downloaded there
    for name in ("HOME", "XDG_CACHE_HOME"):
        if name in user_environment:
            monkeypatch.setenv(name, user_environment[name])
    blocks = re.findall(r"```console\n\$ deepinfer ([^\n]*)\n(.*?)\n```", README, re.DOTALL)
    assert [command.split()[0] for command, _ in blocks] == [
        "install",
        "status",
        "verify",
        "rollback",
        "export",
    ]
    for command, shown in sorted(blocks, key=lambda block: block[0].startswith("rollback")):
        if command.startswith("verify") and importlib.util.find_spec("triton") is None:
            continue
        run = cli(*command.replace("/srv/demo", str(tmp_path)).split())
        assert run.code == 0, run.err
        shown = shown.replace("/srv/demo/env/bin/python", sys.executable)
        want = lines_of(shown.replace("/srv/demo", str(tmp_path)))
        # piped, progress is lines on stderr of which a terminal keeps none
        assert want - lines_of(run.out + run.err) == set(), "refresh the output in the README"
        assert lines_of(run.out) - want == set(), "refresh the output in the README"
