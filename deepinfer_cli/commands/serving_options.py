"""Command-line options of `deepinfer bench --serving`, and which of them were given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.commands.options import option, path_option
from deepinfer_cli.errors import UsageError

# argument of `ServingOptions` → its option, where that is not its name
_OPTIONS = {"endpoints": "--endpoint"}


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers from 1 up, such as 16384 or 1,4")
    return found


def _checked(text: str | None) -> str | None:
    """A callback: here the message names the option."""
    _lengths(text)
    return text


Serving = Annotated[
    bool,
    option("--serving", help="Compare two `vllm serve` instead: all ops on, and the accelerate ops off."),
]
Model = Annotated[
    str | None,
    option(
        "--model", metavar="MODEL", help="With --serving: what `vllm serve` serves. Its arguments follow --."
    ),
]
Small = Annotated[
    bool, option("--small", help="With --serving: a small random V4.1 instead; needs no checkpoint.")
]
Endpoint = Annotated[
    list[str] | None,
    option(
        "--endpoint",
        metavar="URL",
        help="With --serving, twice: compare two running servers, such as http://host:8000.",
    ),
]
Together = Annotated[
    bool, option("--together", help="With --serving: both servers at once, and their runs alternate.")
]
Rounds = Annotated[
    int, option("--rounds", min=1, metavar="N", help="With --serving: start the servers in turn N times.")
]
Runs = Annotated[
    int | None,
    option("--runs", min=1, metavar="N", help="With --serving: measured runs of each kind; default 3."),
]
InputTokens = Annotated[
    str | None,
    option(
        "--input-tokens",
        metavar="N,N",
        callback=_checked,
        help="With --serving: lengths of cold prompts; default 16384,65536.",
    ),
]
Streams = Annotated[
    str | None,
    option(
        "--streams",
        metavar="N,N",
        callback=_checked,
        help="With --serving: requests at once; default 1,4.",
    ),
]
OutputTokens = Annotated[
    int | None,
    option("--output-tokens", min=2, metavar="N", help="With --serving: decoded tokens; default 512."),
]
Prompts = Annotated[
    Path | None,
    path_option(
        "--prompts",
        metavar="FILE",
        help='With --serving: JSON lines {"prompt": …} to decode from; default: code.',
    ),
]
ScoredText = Annotated[
    Path | None, path_option("--text", metavar="FILE", help="With --serving: a text to score; default: code.")
]
Port = Annotated[
    int | None,
    option(
        "--port", min=1, max=65_534, metavar="N", help="With --serving: the first port; default: free ones."
    ),
]
StartTimeout = Annotated[
    float | None,
    option(
        "--start-timeout",
        min=1.0,
        metavar="SECONDS",
        help="With --serving: for a server to answer; default 3600.",
    ),
]
Logs = Annotated[
    Path | None,
    path_option(
        "--logs",
        metavar="DIR",
        help="With --serving: a new folder for logs and raw results; default: a temporary one.",
    ),
]
Seed = Annotated[
    int | None,
    option("--seed", min=0, metavar="N", help="With --serving: of the prompts; default: a new one."),
]


def given(
    model: str | None,
    small: bool,
    endpoint: list[str] | None,
    together: bool,
    rounds: int,
    runs: int | None,
    input_tokens: str | None,
    streams: str | None,
    output_tokens: int | None,
    prompts: Path | None,
    text: Path | None,
    port: int | None,
    seed: int | None,
    start_timeout: float | None,
    logs: Path | None,
) -> dict[str, Any]:
    """Those that were given, as arguments of `ServingOptions`."""
    values: dict[str, Any] = {
        "model": model, "small": small, "endpoints": tuple(endpoint or ()), "together": together,
        "rounds": rounds if rounds > 1 else None, "runs": runs, "input_tokens": _lengths(input_tokens),
        "streams": _lengths(streams), "output_tokens": output_tokens, "prompts": prompts, "text": text, "port": port,
        "seed": seed, "start_timeout_s": start_timeout, "logs": logs,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value not in (None, False, ())}


def run_timeout(timeout: float | None) -> dict[str, Any]:
    """`--timeout`, as an argument of `ServingOptions`."""
    return {} if timeout is None else {"run_timeout_s": timeout}


def refuse(given: dict[str, Any], what: str) -> None:
    """Refuses options that mean nothing here.

    Args:
        given: option, or argument of `ServingOptions`, → value; one without a value was not given.

    Raises:
        UsageError: there is one.
    """
    extra = [name for name, value in given.items() if value not in (None, False, "", [])]
    if extra:
        name = extra[0].removesuffix("_s").replace("_", "-")
        word = _OPTIONS.get(name, name if name.startswith("--") else f"--{name}")
        raise UsageError(
            f"{word} {what}", code="usage", hint="`deepinfer bench --help` says what goes together"
        )
