"""Every command line that a document shows: known options, and run, or marked with what it needs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator

import pytest

from deepinfer_cli import app
from tests.docs import markdown
from tests.docs.conftest import PLACE, PROGRAMS, Reader
from tests.docs.markdown import ROOT, SHELL, Block

BLOCKS = [block for document in markdown.DOCUMENTS for block in markdown.blocks(document)]
_PROGRAM = re.compile(
    rf"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*({'|'.join(PROGRAMS)}|make|pip|vllm|docker|\.venv/bin/\w+) [\w./-]",
    re.MULTILINE,
)
_DEEPINFER = re.compile(r"(?:^|[\s=/`'\"&(])deepinfer ((?:[a-z]|-)[^`|&;)\n]*)")


def blocks_of(document: str) -> list[Block]:
    """Those a test can run, without those that a document before it shows."""
    before: set[tuple[str, ...]] = set()
    for name in markdown.DOCUMENTS[: markdown.DOCUMENTS.index(document)]:
        before |= {block.commands for block in markdown.blocks(name)}
    found = {block.commands: block for block in markdown.blocks(document) if block.language in SHELL}
    return [block for block in found.values() if not block.needs and block.commands not in before]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_says_what_it_is(block: Block) -> None:
    if block.language not in SHELL:
        assert block.language in markdown.FILES
        assert not _PROGRAM.search(block.shown), "commands: open the block with ```sh"
        assert not block.needs
    assert set(block.needs) <= markdown.NEEDS.keys()


def shown(document: str) -> Iterator[str]:
    """What follows `deepinfer` wherever a document shows it: in blocks of any language, and in the text."""
    for block in markdown.blocks(document):
        lines = block.commands if block.language in SHELL else block.shown.splitlines()
        for line in lines:
            yield from _DEEPINFER.findall(line)
    for code in markdown.inline_code(document):
        if code.startswith("deepinfer "):
            yield from _DEEPINFER.findall(code)


@pytest.mark.parametrize("document", markdown.DOCUMENTS)
def test_no_command_has_an_unknown_option(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for line in dict.fromkeys(shown(document)):
        words = [word for word in shlex.split(line, comments=True) if word != "…"]
        # what follows is for another program
        words = words[: words.index("--")] if "--" in words else words
        if app.main([*words, "--help"]) != 0:
            wrong.append(line)
    capsys.readouterr()
    assert wrong == []


def source_of(script: str) -> str:
    """A script, and the modules beside it that it imports."""
    path = ROOT / script
    text = path.read_text(encoding="utf-8")
    beside = (path.parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.MULTILINE))
    return text + "".join(each.read_text(encoding="utf-8") for each in beside if each.exists())


@pytest.mark.parametrize("document", markdown.DOCUMENTS)
def test_the_scripts_and_their_options_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in markdown.blocks(document):
        for command in block.commands:
            words = shlex.split(command)
            if words[0] == "make":
                assert set(words[1:]) <= targets, command
            for script in (word for word in words if re.fullmatch(r"[\w/]+\.(py|sh)", word)):
                text = source_of(script)
                options = [word.partition("=")[0] for word in words if word.startswith("--")]
                assert [option for option in options if f'"{option}"' not in text] == [], command


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
@pytest.mark.parametrize("document", [name for name in markdown.DOCUMENTS if blocks_of(name)])
def test_the_commands_run_and_print_what_is_shown(document: str, reader: Reader) -> None:
    for block in blocks_of(document):
        if "compile" in block.shown and importlib.util.find_spec("triton") is None:
            continue
        for command in block.commands:
            run = reader.types(command)
            assert run.code == block.exit_code, f"{block.place}: {command}\n{run.out}{run.err}"
        if block.language == "console":
            shown = block.output.replace(f"{PLACE}/env/bin/python", sys.executable)
            want = lines_of(shown.replace(PLACE, str(reader.folder)))
            # piped, progress is lines on stderr of which a terminal keeps none
            assert want - lines_of(run.out + run.err) == set(), f"refresh the output in {block.place}"
            assert lines_of(run.out) - want == set(), f"refresh the output in {block.place}"
