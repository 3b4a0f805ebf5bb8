"""What `bench --serving` measures, on which servers and in which order, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import UsageError
from deepinfer_cli.serve.line import parse_options

OVERLAY, ENABLE_ONLY = "overlay", "enable-only"
ENDPOINTS = ("endpoint-a", "endpoint-b")
PREFILL, DECODE, SCORE = "prefill", "decode", "nll"

INPUT_LENGTHS = (16_384, 65_536)
SMALL_INPUT_LENGTHS = (4_096, 16_384)
STREAMS = (1, 4)
OUTPUT_TOKENS, SMALL_OUTPUT_TOKENS = 512, 128
SMALL_POSITIONS = (65_536 - 64) * 4 // 5
# tokens before the first decoded one, where prompts are random
DECODE_INPUT_TOKENS = 1_024
REPEATS = 3
# of scored text: a longer piece would ask vLLM for more logits at once than a full GPU may have room for
PIECE_TOKENS, PIECES = 1_024, 4
# vLLM's sharegpt loader drops prompts and answers that are longer together, and prompts of more than 1,024
SHAREGPT_OUTPUT_TOKENS = 1_024

# what is decided here, or would hide the servers from what drives them
_OURS = ("--host", "--port", "--uds", "--api-key", "--headless", "--model", "--grpc")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers.

    Attributes:
        name: `overlay` or `enable-only`, or of `ENDPOINTS`.
        off: ops left to stock in it.
        base_url: of a server that runs already.
    """

    name: str
    off: tuple[str, ...] = ()
    base_url: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of traffic.

    Attributes:
        kind: `prefill` or `decode`.
        input_tokens: of a random prompt; None where prompts come from a file.
        output_tokens: decoded for each request, whatever the model would end with.
        streams: requests, all at once.
        prompts: `random`, `code` or `custom`.
    """

    kind: str
    input_tokens: int | None
    output_tokens: int
    streams: int
    prompts: str = "random"

    @property
    def case(self) -> dict[str, Any]:
        """What tells its rows apart."""
        return {
            "input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "streams": self.streams,
            "prompts": self.prompts,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """In words: `prefill 16384`, `decode 4 streams`."""
        if self.kind == PREFILL:
            return f"prefill of {self.input_tokens} tokens"
        return f"decode, {self.streams} stream{'s' if self.streams > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Request:
    """All that a measurement depends on.

    Attributes:
        python: the interpreter that serves vLLM.
        parent: folder to put first on its path; None where it finds the right vLLM itself.
        sides: the two servers.
        model: what `vllm serve` serves; None for the small one, or for running servers that say it themselves.
        small: serve the small random V4.1.
        extra: further arguments of `vllm serve`.
        arch: the architecture whose kernels run; None where it is not known (running servers).
        generate: Triton generates code for `arch`, and vLLM sees its capability, on a newer card.
        memory_bytes: of a GPU.
        input_lengths: prompts of the prefill workloads, tokens.
        streams: requests at once of the decode workloads.
        output_tokens: that each of those decodes.
        repeats: measured runs of each workload on each side.
        rounds: how often the servers take turns, where one runs at a time.
        together: both run at once, and runs alternate.
        seed: of the first prompt.
        prompts: the user's JSONL file of decode prompts.
        text: the user's file to score.
        port: the user's choice of the first port.
        start_timeout_s, run_timeout_s: for a server to answer, and for one run.
    """

    python: Path
    parent: Path | None
    sides: tuple[Side, Side]
    model: str | None = None
    small: bool = False
    extra: tuple[str, ...] = ()
    arch: str | None = None
    generate: bool = False
    memory_bytes: int = 24 * 10**9
    input_lengths: tuple[int, ...] = INPUT_LENGTHS
    streams: tuple[int, ...] = STREAMS
    output_tokens: int = OUTPUT_TOKENS
    repeats: int = REPEATS
    rounds: int = 1
    together: bool = False
    seed: int = 1
    prompts: Path | None = None
    text: Path | None = None
    port: int | None = None
    start_timeout_s: float = 3_600.0
    run_timeout_s: float = 1_800.0

    @property
    def started(self) -> bool:
        """Whether the servers are ours to start."""
        return all(side.base_url is None for side in self.sides)

    def workloads(self) -> tuple[Workload, ...]:
        """All workloads, in the order they run."""
        source = "custom" if self.prompts else "random" if self.small else "code"
        length = DECODE_INPUT_TOKENS if source == "random" else None
        return (
            *(Workload(PREFILL, tokens, 1, 1) for tokens in self.input_lengths),
            *(Workload(DECODE, length, self.output_tokens, streams, source) for streams in self.streams),
        )

    def served_name(self, side: Side) -> str:
        """The name under which a server of ours serves the model: by it, it is known to be ours."""
        given = value_of(self.extra, "--served-model-name")
        return given or f"deepinfer-{side.name}"


def has_option(arguments: Sequence[str], name: str) -> bool:
    """Whether the option `--name` is among them, however it is written (`--name=…`, `--na_me`)."""
    return name.lstrip("-") in parse_options(arguments)


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value that the arguments give an option; `true` for a switch."""
    return parse_options(arguments).get(name.lstrip("-"))


def check(request: Request) -> None:
    """Refuses what cannot be run.

    Raises:
        UsageError: options that do not go together.
    """
    for name in _OURS:
        if has_option(request.extra, name):
            raise UsageError(
                f"{name} is not yours to give to `vllm serve` here",
                code="usage",
                hint="the model and the port have options of `deepinfer bench`",
            )
    if request.rounds > request.repeats:
        raise UsageError(
            f"--rounds {request.rounds} needs as many runs: --runs {request.repeats} are too few",
            code="usage",
            hint=f"pass --runs {request.rounds}",
        )
    if request.small and max(request.input_lengths) > SMALL_POSITIONS:
        raise UsageError(
            f"the small model has {SMALL_POSITIONS} positions: {max(request.input_lengths)} tokens are too many",
            code="usage",
            hint="pass a shorter --input-tokens",
        )
    coded = any(work.prompts == "code" for work in request.workloads())
    if coded and request.output_tokens > SHAREGPT_OUTPUT_TOKENS:
        raise UsageError(
            f"--output-tokens {request.output_tokens} is more than vLLM's loader lets through: "
            f"{SHAREGPT_OUTPUT_TOKENS}",
            code="usage",
            hint="with prompts of your own, --prompts FILE.jsonl, there is no such limit",
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """One `vllm bench serve`.

    Attributes:
        id: also its result file's name.
        side: whose server it drives.
        workload, repeat: what it measures; a warm-up has repeat None.
        seed: of its prompts.
    """

    id: str
    side: Side
    workload: Workload
    repeat: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch during which the same servers run.

    Attributes:
        sides: whose servers.
        repeats: which repetitions are measured; alternately where there are two servers.
    """

    sides: tuple[Side, ...]
    repeats: tuple[int, ...]


def turns(request: Request) -> tuple[Turn, ...]:
    """Who is measured when: both at once; or A, B, then B, A, and so on, each server staying where it comes twice."""
    everything = tuple(range(request.repeats))
    if request.together or not request.started:
        return (Turn(request.sides, everything),)
    line: list[Turn] = []
    for number in range(request.rounds):
        part = everything[number :: request.rounds]
        for side in request.sides if number % 2 == 0 else reversed(request.sides):
            if line and line[-1].sides == (side,):
                line[-1] = Turn((side,), line[-1].repeats + part)
            else:
                line.append(Turn((side,), part))
    return tuple(line)


def benches(request: Request, turn: Turn, number: int) -> list[Bench]:
    """The runs of a turn: each workload once to warm up, then its repetitions, the first side first every other time.

    Prompts differ from run to run; a repetition has the same ones on both sides.

    Args:
        number: of the turn, for names.
    """
    found = []
    for place, work in enumerate(request.workloads()):
        seed = request.seed + 10_000 * place
        found += [
            Bench(f"{number}-{place}-warm-{side.name}", side, work, None, seed + 5_000 + 100 * number + index)
            for index, side in enumerate(turn.sides)
        ]
        for repeat in turn.repeats:
            sides = turn.sides if repeat % 2 == 0 else tuple(reversed(turn.sides))
            found += [
                Bench(f"{number}-{place}-{repeat}-{side.name}", side, work, repeat, seed + repeat)
                for side in sides
            ]
    return found
