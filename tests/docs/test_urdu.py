"""README.ur.md renders: code runs left to right in right-to-left text, and the commands are those of README.md."""

from __future__ import annotations

import re
import unicodedata

from tests.docs import markdown

NAME = "README.ur.md"
TEXT = markdown.read(NAME)
OPEN = '<div dir="rtl" lang="ur">\n'
# what is isolated from the direction around it
ISOLATED = re.compile(r'<(code|span) dir="ltr">[^<]*</\1>')


def prose() -> list[str]:
    """Lines of right-to-left text without links' targets, tags, emphasis and what is isolated."""
    outside = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    outside = ISOLATED.sub("￼", outside)
    outside = re.sub(r"\]\([^)]*\)", "]", outside)
    lines = [re.sub(r"<[^>]*>|[*|\[\]>#]|^\d+\. ", "", line).strip() for line in outside.splitlines()]
    return [line for line in lines if line and not set(line) <= set("-")]


def is_rtl(character: str) -> bool:
    return unicodedata.bidirectional(character) in {"R", "AL"}


def test_code_blocks_are_outside_of_the_right_to_left_parts() -> None:
    inside, seen = False, 0
    for token in markdown.tokens(NAME):
        if token.type == "html_block" and "needs:" not in token.content:
            # with anything else in it, what follows would be HTML and not Markdown
            assert token.content == ("</div>\n" if inside else OPEN)
            inside = not inside
        elif token.type == "fence":
            seen += 1
            assert not inside, token.content
        elif token.type in {"paragraph_open", "heading_open", "table_open", "ordered_list_open"}:
            assert inside, token.map
    assert seen >= 3 and not inside


def test_inline_code_says_its_direction() -> None:
    assert "`" not in re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert TEXT.count("<code") == TEXT.count('<code dir="ltr">') > 5


def test_no_option_path_or_unit_stands_bare_in_the_text() -> None:
    # at the border of a left-to-right run such characters jump to the other side of the word
    bare = re.compile(
        r"(?<![\w.])[-./_~$=]+\w"  # --option, .folder, /path
        r"|[A-Za-z0-9][-/_=,:;!?]+(?!\w)"  # Latin punctuation after Latin
        r"|\b\d[\d.,]*\s?(?:[KMGT]i?B|%|x)(?!\w)"  # number and unit
        r"|[.,;?!](?=\s|$)"  # Latin punctuation in Urdu
    )
    found = [line for line in prose() if bare.search(line)]
    assert found == []


def test_paragraphs_end_with_urdu_punctuation_and_letters_are_urdu() -> None:
    assert not [line for line in prose() if re.search(r"[A-Za-z0-9)]\s*[.,;?]$", line)]
    # Arabic's yeh and kaf look alike in some fonts only, and no search finds them
    assert not set("يكه") & set(TEXT)
    assert all(
        any(is_rtl(character) for character in line)
        for line in prose()
        if line not in {"English", "DeepInfer"}
    )


def test_the_commands_are_those_of_the_readme() -> None:
    own = [block for block in markdown.blocks(NAME) if block.commands]
    english = [block for block in markdown.blocks("README.md") if block.language == "sh"]
    assert own and [(block.shown, block.needs) for block in own] == [
        (block.shown, block.needs) for block in english if block.shown in {mine.shown for mine in own}
    ]
    typed = {command for block in own for command in block.commands}
    assert {"deepinfer status", "deepinfer rollback", "make quickstart", "make test"} <= typed
    assert {
        "deepinfer doctor",
        "deepinfer install --dry-run",
        "deepinfer install",
        "deepinfer verify",
    } <= typed


def test_what_is_called_isolated_shows_no_urdu() -> None:
    for match in ISOLATED.finditer(TEXT):
        assert not any(is_rtl(character) for character in match[0]), match[0]
