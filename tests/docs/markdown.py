"""What the documents show: fenced blocks with their marks, inline code, links and headings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "README.ur.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
    "benchmarks/README.md",
    "CONTRIBUTING.md",
)
# languages of blocks whose lines a reader types
SHELL = ("sh", "console")
# languages of blocks that show a file, or (none) a picture
FILES = ("", "python", "dockerfile", "ini", "yaml", "json")
# `<!-- needs: gpu, network -->` before a block: why a test without them cannot run it
NEEDS = {
    "gpu": "a GPU that is served",
    "network": "a package index, or a model hub",
    "docker": "a container runtime",
    "files": "files that only the reader has",
}
_MARK = re.compile(r"<!-- (needs|exit): ([^>]*?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: `shown` is what it holds, `needs` and `exit_code` what the comment before it says."""

    document: str
    line: int
    language: str
    shown: str
    needs: tuple[str, ...] = ()
    exit_code: int = 0

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> tuple[str, ...]:
        """Command lines without comments, continued lines joined."""
        if self.language not in SHELL:
            return ()
        lines = self.shown.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        bare = (re.sub(r"(^|\s)#\s.*$", "", line).strip() for line in lines)
        return tuple(re.sub(r"\s+", " ", line) for line in bare if line)

    @property
    def output(self) -> str:
        """What a `console` block shows below its command."""
        return self.shown.partition("\n")[2]


def read(document: str) -> str:
    """The text of a document, named from the root."""
    return (ROOT / document).read_text(encoding="utf-8")


def tokens(document: str) -> list[Token]:
    """The document as CommonMark with tables."""
    return parse(read(document))


def parse(text: str) -> list[Token]:
    """`text` as CommonMark with tables."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(document: str) -> Iterator[Block]:
    """Every block of code, fenced or indented (which has no language)."""
    return blocks_in(tokens(document), document)


def blocks_in(parsed: list[Token], document: str) -> Iterator[Block]:
    """Those of a parsed document."""
    marks: list[tuple[str, str]] = []
    for token in parsed:
        if token.type == "html_block":
            marks += _MARK.findall(token.content)
        elif token.type in {"fence", "code_block"}:
            said = dict(marks)
            yield Block(
                document,
                token.map[0] + 1 if token.map else 0,
                token.info.split()[0] if token.info.strip() else "",
                token.content.rstrip("\n"),
                tuple(item.strip() for item in said.get("needs", "").split(",") if item.strip()),
                int(said.get("exit", 0)),
            )
        if token.type != "html_block":
            marks = []


def inline_code(document: str) -> Iterator[str]:
    """Every span of inline code, in Markdown and in HTML."""
    yield from re.findall(r'<code dir="ltr">([^<]*)</code>', read(document))
    for token in tokens(document):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def anchors(document: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    found = set()
    for token, text in itertools.pairwise(tokens(document)):
        if token.type == "heading_open":
            plain = "".join(child.content for child in text.children or ())
            found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def links(document: str) -> Iterator[str]:
    """Targets of links and images, in Markdown and in HTML."""
    for token in tokens(document):
        for child in (token, *(token.children or ())):
            for name in ("href", "src"):
                if child.attrGet(name):
                    yield str(child.attrGet(name))
            if child.type in {"html_block", "html_inline"}:
                yield from re.findall(r'(?:href|src)="([^"]+)"', child.content)
