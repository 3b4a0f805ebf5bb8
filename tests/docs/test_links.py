"""Links lead somewhere: files, and headings in them."""

from __future__ import annotations

import pytest

from tests.docs import markdown
from tests.docs.markdown import ROOT


@pytest.mark.parametrize("document", markdown.DOCUMENTS)
def test_links(document: str) -> None:
    folder = (ROOT / document).parent
    lost = []
    for link in markdown.links(document):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / document
        if "://" in link:
            continue
        found = target.exists()
        if found and anchor:
            found = anchor in markdown.anchors(target.relative_to(ROOT).as_posix())
        if not found:
            lost.append(link)
    assert lost == []


def test_every_document_is_reached_from_the_readme() -> None:
    reached = {link.partition("#")[0] for link in markdown.links("README.md")}
    assert {name for name in markdown.DOCUMENTS if name != "README.md"} - reached == set()
