"""What the other tests read out of a document is what a reader sees."""

from __future__ import annotations

from tests.docs.markdown import Block, blocks_in, parse

TEXT = """
<!-- needs: gpu, network -->
```sh
deepinfer install \\
  --yes         # asks nothing
# only a comment
pip install 'a#b'
```
<!-- exit: 3 -->
```console
$ deepinfer doctor
$5
```
```sh
cp a b
```

<!-- needs: gpu -->
words in between

```sh
ls
```

    indented
"""


def read(text: str) -> list[Block]:
    return list(blocks_in(parse(text), "a.md"))


def test_a_mark_holds_for_the_block_after_it_alone() -> None:
    assert [(block.needs, block.exit_code) for block in read(TEXT)] == [
        (("gpu", "network"), 0),
        ((), 3),
        ((), 0),
        ((), 0),
        ((), 0),
    ]


def test_commands_and_output() -> None:
    first, second, *_, last = read(TEXT)
    assert first.commands == ("deepinfer install --yes", "pip install 'a#b'")
    assert second.commands == ("deepinfer doctor",) and second.output == "$5"
    assert last.language == "" and last.commands == () and last.shown == "indented"
    assert first.place == "a.md:3"
