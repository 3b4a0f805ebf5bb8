"""The README says what the code does: every error code with its exit code, every switch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deepinfer_cli import errors
from deepinfer_cli.errors import DeepInferError, ExitCode

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
