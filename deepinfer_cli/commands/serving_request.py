"""What `deepinfer bench --serving` was asked: which servers, on which vLLM, and what does not go together."""

from __future__ import annotations

import secrets
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import e2e as e2e_command
from deepinfer_cli.commands import verify
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import arch_name
from deepinfer_cli.errors import UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.serve import settings
from deepinfer_cli.serve.line import parse_options
from deepinfer_cli.serve.memory import Load
from deepinfer_cli.validate import runner, switches
from deepinfer_cli.validate.e2e import plan as e2e
from deepinfer_cli.validate.serving import arguments, plan

_SEEDS = 1_000_000_000
# the small model has layers and heads of its own
_SPREADING = {"tensor-parallel-size", "pipeline-parallel-size"}


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What `bench --serving` was asked to do.

    Attributes:
        where: which vLLM; `python` also names the interpreter that serves it.
        serve_arguments: what follows `--`: arguments of `vllm serve`.
        endpoints: `--endpoint`, twice: running servers.
        logs: `--logs DIR`; a new temporary folder if left out. It is kept.
        run_timeout_s: `--timeout SECONDS` for one run.

    The others are `plan.Request`'s.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    serve_arguments: tuple[str, ...] = ()
    model: str | None = None
    small: bool = False
    endpoints: tuple[str, ...] = ()
    together: bool = False
    rounds: int = 1
    runs: int = plan.REPEATS
    input_tokens: tuple[int, ...] | None = None
    streams: tuple[int, ...] = plan.STREAMS
    output_tokens: int | None = None
    prompts: Path | None = None
    text: Path | None = None
    port: int | None = None
    seed: int | None = None
    start_timeout_s: float = 3_600.0
    run_timeout_s: float = 1_800.0
    arch: str | None = None
    output: Path | None = None
    logs: Path | None = None


def check(opts: ServingOptions) -> None:
    """Refuses options that do not go together.

    Raises:
        UsageError: there are two.
    """
    asked = [name for name, given in (
        ("--model", opts.model and not opts.endpoints), ("--small", opts.small), ("--endpoint", opts.endpoints),
    ) if given]  # fmt: skip
    if len(asked) != 1:
        what = f"{asked[0]} and {asked[1]} do not go together" if asked else "there is nothing to serve"
        raise UsageError(
            what, code="usage", hint="pass --model MODEL, --small, or --endpoint URL twice; arguments of "
            "`vllm serve` follow --",
        )  # fmt: skip
    if opts.endpoints and len(opts.endpoints) != 2:
        raise UsageError(
            "--endpoint is needed twice: one server on each side",
            code="usage",
            hint="--endpoint A --endpoint B",
        )
    if opts.endpoints:
        first, second = map(base_url, opts.endpoints)
        if first == second:
            raise UsageError(
                f"both --endpoint name {first}, which cannot be compared with itself",
                code="usage",
                hint="name two servers: --endpoint A --endpoint B",
            )
        given = {
            "--together": opts.together,
            "--rounds": opts.rounds > 1,
            "--port": opts.port,
            "--arch": opts.arch,
        }
        extra = [name for name, value in given.items() if value] + list(opts.serve_arguments[:1])
        if extra:
            raise UsageError(
                f"{extra[0]} is for servers that are started here, and --endpoint names running ones",
                code="usage",
                hint=f"leave out {extra[0]}, or pass --model MODEL instead of --endpoint",
            )
    if opts.together and opts.rounds > 1:
        raise UsageError(
            "--rounds is for servers that take turns, and --together starts both",
            code="usage",
            hint="pass one of them: --together where both fit, else --rounds; --runs says how often either measures",
        )


def base_url(url: str) -> str:
    """A server's address without what follows it: `http://HOST:PORT`, perhaps with a path.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        legal = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        legal = False
    if not legal or any(char.isspace() for char in url) or parts.query or parts.fragment:
        raise UsageError(
            f"--endpoint {url} is no address of a server",
            code="usage",
            hint="name it as http://HOST:PORT",
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def check_settings(request: plan.Request, release: str | None, out: Output) -> None:
    """Refuses arguments and variables with which no server of the overlay would serve; warns of dubious ones.

    Raises:
        UsageError: there are some.
    """
    options = parse_options(request.extra)
    if request.small:
        options = {name: value for name, value in options.items() if name not in _SPREADING}
    # of the variables those that servers get, without what is set for them here
    environ = arguments.environment(request, None)
    found = settings.check(settings.Settings(environ, options, release or Load().release))
    for one in found:
        if one.severity == "note":
            out.warn(f"{one.name}: {one.text}; {one.hint}")
    wrong = [one for one in found if one.severity == "problem"]
    if wrong:
        raise UsageError(
            "; ".join(f"{one.name} goes wrong with DeepSeek-V4.1 on SM8x: {one.text}" for one in wrong),
            code="usage",
            hint="; ".join(f"{one.name}: {one.hint}" for one in wrong),
        )


def _request(opts: ServingOptions, python: Path, parent: Path | None, **more: Any) -> plan.Request:
    return plan.Request(
        python=python, parent=parent, model=opts.model, small=opts.small, extra=opts.serve_arguments,
        input_lengths=opts.input_tokens or (plan.SMALL_INPUT_LENGTHS if opts.small else plan.INPUT_LENGTHS),
        output_tokens=opts.output_tokens or (plan.SMALL_OUTPUT_TOKENS if opts.small else plan.OUTPUT_TOKENS),
        streams=opts.streams, repeats=opts.runs, rounds=opts.rounds, together=opts.together,
        # a server that has seen a prompt has it in its cache: every measurement has its own
        seed=secrets.randbelow(_SEEDS) if opts.seed is None else opts.seed,
        prompts=opts.prompts, text=opts.text, port=opts.port, start_timeout_s=opts.start_timeout_s,
        run_timeout_s=opts.run_timeout_s, **more,
    )  # fmt: skip


def of_endpoints(opts: ServingOptions, out: Output) -> tuple[plan.Request, dict[str, Any]]:
    """Two running servers; a vLLM is needed for its benchmark alone.

    Returns:
        The request, and what the interpreter answered (see `runner.probe`).
    """
    target = verify.find_target(opts.where, out)
    python = verify.interpreter(opts.where, target, out)
    parent = None if target is None else e2e_command.parent_of(e2e_command.E2eOptions(target, python))
    sides = [
        plan.Side(name, base_url=base_url(url))
        for name, url in zip(plan.ENDPOINTS, opts.endpoints, strict=True)
    ]
    found = runner.probe(python, (parent,) if parent else ())
    return _request(opts, python, parent, sides=(sides[0], sides[1])), found


def of_servers(opts: ServingOptions, out: Output) -> tuple[plan.Request, dict[str, Any]]:
    """The target, with all ops and without those that only make it faster.

    Returns:
        The request, and what the interpreter answered, with `payload`, the installed overlay.

    Raises:
        UnsupportedError: no vLLM, no overlay or no GPU.
        UsageError: the overlay is switched off, or a setting goes wrong (see `check_settings`).
    """
    target = verify.find_target(opts.where, out)
    if target is None or target.layout is None:
        raise UnsupportedError(
            "there is no vLLM with DeepSeek-V4.1 to serve",
            code="nothing-runnable",
            hint="name one with --target",
        )
    installed = e2e_command.installed(target)
    set_ = switches.read(installed)
    if set_.disabled:
        raise UsageError(
            "DEEPINFER_DISABLE is on: both servers would be stock",
            code="usage",
            hint="unset DEEPINFER_DISABLE",
        )
    python = verify.interpreter(opts.where, target, out)
    wanted = e2e_command.E2eOptions(target, python)
    parent = e2e_command.parent_of(wanted)
    found = runner.probe(python, (parent,) if parent else ())
    gpu = e2e_command.gpu_of(python, found)
    arch = e2e_command.choose_arch(gpu, arch_name(opts.arch) if opts.arch else set_.forced)
    off = tuple(sorted({*set_.ops, *e2e.accelerating(e2e.groups_of(installed))}))
    sides = (plan.Side(plan.OVERLAY, set_.ops), plan.Side(plan.ENABLE_ONLY, off))
    native = tuple(gpu["capability"]) == e2e.CAPABILITIES[arch]
    out.note(f"{gpu['name']}: {arch} code{'' if native else ', forced'}; {python}")
    request = _request(
        opts, python, parent, sides=sides, arch=arch, generate=not native, memory_bytes=gpu["memory_bytes"]
    )
    check_settings(request, target.version, out)
    return request, found | {"payload": str(installed)}
