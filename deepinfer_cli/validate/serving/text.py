"""Texts that every machine has: the sources of Python's standard library, as prompts and as a text to score."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import random
from pathlib import Path

from deepinfer_cli.errors import FailedError, UsageError

# modules of pure Python that every version has
_MODULES = (
    "argparse", "ast", "calendar", "configparser", "csv", "dataclasses", "difflib", "email.message", "fractions",
    "gettext", "heapq", "html.parser", "http.client", "inspect", "json.decoder", "logging", "mailbox", "optparse",
    "pathlib", "pickle", "pprint", "random", "shlex", "shutil", "statistics", "tarfile", "textwrap", "typing", "zipfile",
)  # fmt: skip
# about 700 tokens of code: vLLM's loader drops prompts of more than 1,024
PROMPT_CHARS = 2_200
_PROMPTS = 64
SCORED_CHARS = 60_000


def sources() -> dict[str, str]:
    """Module → source, of those that this Python has as text."""
    found = {}
    for name in _MODULES:
        try:
            found[name] = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError, TypeError):
            continue
    return found


def write_prompts(path: Path, seed: int) -> None:
    """Writes beginnings of code, to be gone on with, as vLLM's sharegpt loader reads them.

    Raises:
        FailedError: this Python has no sources.
    """
    texts = [text for text in sources().values() if len(text) > 2 * PROMPT_CHARS]
    if not texts:
        raise FailedError(
            "this Python has no sources to make prompts of",
            code="prompts-missing",
            hint="name a JSONL file of your own with --prompts",
        )
    pick = random.Random(seed)
    entries = []
    for _ in range(_PROMPTS):
        text = pick.choice(texts)
        start = text.find("\n", pick.randrange(len(text) - PROMPT_CHARS)) + 1
        prompt = text[start : start + PROMPT_CHARS]
        # the answer's length is an option; the loader wants one nevertheless
        entries.append({"conversations": [{"value": prompt}, {"value": "as long as asked for"}]})
    path.write_text(json.dumps(entries), encoding="utf-8")


def check(prompts: Path | None, scored: Path | None) -> None:
    """Refuses files that cannot be used, before a server is started for them.

    Args:
        prompts: JSON lines with `prompt`, in a file that ends with `.jsonl`, as vLLM's custom dataset has them.
        scored: a text.

    Raises:
        UsageError: one cannot be read, or is not that.
    """
    if scored is not None and not _read(scored, "the text").strip():
        raise UsageError(f"the text in {scored} is empty", code="usage", hint="name a UTF-8 file")
    if prompts is None:
        return
    lines = [line for line in _read(prompts, "the prompts").splitlines() if line.strip()]
    if prompts.suffix != ".jsonl" or not lines or not all(map(_has_prompt, lines)):
        raise UsageError(
            f"{prompts} is no list of prompts that vLLM's benchmark reads",
            code="usage",
            hint='name a FILE.jsonl with {"prompt": "..."} in each line',
        )


def _has_prompt(line: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("prompt"), str)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} cannot be read: {error}", code="usage", hint="name a UTF-8 file") from error


def to_score(path: Path | None) -> tuple[str, dict[str, str]]:
    """The text to score, and what to say of it: its source and sha256.

    Raises:
        UsageError: the user's file cannot be read.
    """
    if path is None:
        text, name = "\n".join(sources().values())[:SCORED_CHARS], "sources of Python's standard library"
    else:
        text, name = _read(path, "the text")[:SCORED_CHARS], path.name
    return text, {"source": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
