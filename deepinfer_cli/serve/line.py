"""Reads a `vllm serve` line as a user pastes it: out of a shell, a script, a `docker run` or a systemd unit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from deepinfer_cli.errors import UsageError

# vLLM's own short names: engine/arg_utils.py
_LONG = {
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
_OPTION = re.compile(r"-+[A-Za-z]")
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUBSTITUTED = re.compile(r"\$\([^()]*\)|`[^`]*`")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_SEPARATORS = "();<>|&\n"
_API_SERVER = ("vllm.entrypoints.openai.api_server", "vllm/entrypoints/openai/api_server.py")
_EXAMPLE = "such as: --serve 'vllm serve MODEL -tp 8'; options alone will do: --serve='-tp 8'"


@dataclass(frozen=True)
class Line:
    """A server's command line.

    Attributes:
        options: long option name without dashes → value; `true` for a switch.
        environ: what the line itself sets.
        unread: options and variables whose value the shell fills in (`$GPUS`): they are in neither of the two.
    """

    options: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def parse(text: str) -> Line:
    """The serve line in `text`, which may be a piece of a script or options alone.

    Raises:
        UsageError: there is none, there are several, or a quotation does not end.
    """
    try:
        commands = list(_commands(text))
    except ValueError as error:
        message = str(error)[:1].lower() + str(error)[1:]
        raise UsageError(
            f"--serve cannot be read: {message}", code="usage", hint="quote it as a whole, once"
        ) from error
    found = [(at, start) for at, words in enumerate(commands) if (start := start_of(words)) is not None]
    if not found:
        raise UsageError("there is no serve line in what --serve was given", code="usage", hint=_EXAMPLE)
    if len(found) > 1:
        raise UsageError("--serve was given several serve lines", code="usage", hint="one at a time")
    at, start = found[0]
    before = [word for words in commands[:at] for word in _exported(words)]
    environ = dict(_assignments([*before, *commands[at][:start]]))
    options = parse_options(commands[at][start:])
    everything = {f"--{name}": value for name, value in options.items()} | environ
    unread = tuple(name for name, value in everything.items() if "$" in value)
    return Line(
        {name: value for name, value in options.items() if f"--{name}" not in unread},
        {name: value for name, value in environ.items() if name not in unread},
        unread,
    )


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """The options in a command's words: `--name value`, `--name=value`, `-tp 8`; JSON may be in several words."""
    found: dict[str, str] = {}
    name = None
    for word in words:
        if _OPTION.match(word):
            head, equals, value = word.partition("=")
            top, dot, rest = _LONG.get(head, head.lstrip("-")).partition(".")
            name = top.replace("_", "-") + dot + rest
            found[name] = value if equals else ""
        elif name is not None:
            found[name] = f"{found[name]} {word}".strip()
        # what follows a whole value is the model
        if name is not None and found[name] and found[name].count("{") <= found[name].count("}"):
            name = None
    return {key: value or "true" for key, value in found.items()}


def start_of(words: Sequence[str]) -> int | None:
    """Where a server's own words begin in a command: after `vllm serve`, vLLM's module or its image; None if it is none."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else "vllm"
        if word == "serve" and (
            PurePosixPath(before).name == "vllm" or before == "vllm.entrypoints.cli.main"
        ):
            return at + 1
        if word.endswith(_API_SERVER):
            return at + 1
    for at, word in enumerate(words):
        # the image's entry point is `vllm serve`
        if "vllm-openai" in word and not word.startswith("-") and "run" in words[:at]:
            return at + 1
    return 0 if words and _OPTION.match(words[0]) else None


def _commands(text: str) -> Iterator[list[str]]:
    text = _COMMENT.sub("", text.replace("\r\n", "\n")).replace("\\\n", " ")
    # what the shell would put in has no spaces here, and keeps its sign
    text = _SUBSTITUTED.sub("$", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in lexer:
        if word and not word.strip(_SEPARATORS):
            yield from [words] if words else []
            words = []
        else:
            words.append(word)
    yield from [words] if words else []


def _exported(words: Sequence[str]) -> Sequence[str]:
    """What a line before the server's hands on: `export A=1`, and a systemd unit's `Environment=A=1`."""
    name, _, value = words[0].partition("=")
    return [value, *words[1:]] if name == "Environment" else words[1:] if name == "export" else ()


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`NAME=value` in front of a command, after `export`, or after docker's `-e`."""
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found is not None:
            yield found[1], found[2]
