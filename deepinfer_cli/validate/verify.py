"""Runs the levels that this machine allows, and says which it could not."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.detect.gpu import SERVED
from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.errors import UsageError
from deepinfer_cli.overlay import manifest, payload
from deepinfer_cli.render import joined
from deepinfer_cli.validate import liverun, runner, toolkit
from deepinfer_cli.validate.model import CaseResult, Level, NotRun, Status, VerifyReport

ARCHS = tuple(SERVED.values())
_ELSEWHERE = "run it on the machine that serves vLLM"
# more workers than this at once would wait for each other
_MOST_AT_ONCE = 8
_GPU_AT_ONCE = 4
# what one worker of the smoke suite may take of a card: its context, and small cases
_SMOKE_WORKER_BYTES = 3 * 10**9
_TILE_THREADS = 4
# an op's cases in the interpreter, where there are cores for several workers
_PARTS = 3
# with less memory, cases that run side by side could take it from each other
_ROOMY_BYTES = 80 * 10**9

OnEvent = Callable[[CaseResult | NotRun], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What to verify.

    Attributes:
        target: the vLLM; None verifies the bundled payload alone.
        payload_root: the overlay to test.
        python: interpreter of the workers.
        levels: the levels asked for; empty means all that are possible.
        ops: ops asked for; empty means all of the payload.
        case: one case id; nothing else runs.
        archs: architectures of the compile gate; the first is forced on a card that is not SM8x.
        arch: the one given with `--arch`, None without.
        max_smem: only variants of at most so many bytes of shared memory.
    """

    target: Target | None
    payload_root: Path
    python: Path
    levels: tuple[Level, ...] = ()
    suite: str = "smoke"
    ops: tuple[str, ...] = ()
    case: str | None = None
    arch: str | None = None
    max_smem: int | None = None
    timeout_s: float = runner.DEFAULT_TIMEOUT_S

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that the compile gate builds for."""
        return (self.arch,) if self.arch else ARCHS


@dataclass(slots=True)
class _Run:
    request: Request
    digest: str
    ops: tuple[str, ...]
    caches: dict[str, str]
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    crew: runner.Crew = field(default_factory=runner.Crew)
    took: list[tuple[Level, str, float]] = field(default_factory=list)

    def job(self, task: str, level: Level, op: str, env: dict[str, str], **more: Any) -> runner.Job:
        body = {
            "task": task, "level": level.value, "payload": str(self.request.payload_root), "digest": self.digest,
            "op": op, "suite": self.request.suite, "archs": list(self.request.archs),
            "max_smem": self.request.max_smem, **more,
        }  # fmt: skip
        return runner.Job(self.request.python, body, self.caches | env, self.request.timeout_s)

    def languages(self, op: str) -> tuple[str, ...]:
        """What the op's kernels are written in."""
        return languages_of(self.request.payload_root, op)

    def run(self, jobs: list[runner.Job], at_once: int) -> Iterator[CaseResult]:
        """Results of the one case asked for, or of all."""
        cases = [self.request.case] if self.request.case else None
        yield from runner.run_many(jobs, cases, at_once, within=self.crew, on_end=self._end)

    def _end(self, job: runner.Job, seconds: float) -> None:
        self.took.append((job.level, str(job.request["op"]), seconds))


# a workload runs on both; every other case belongs to one level
_SHARE_CASES = {Level.INTERPRETER, Level.NUMERICS}


def ops_of(root: Path) -> tuple[str, ...]:
    """The ops of the payload at `root`: those that have workloads."""
    return tuple(sorted(path.parent.name for path in root.glob("ops/*/workloads.py")))


def bindings_only(root: Path) -> tuple[str, ...]:
    """The ops of the payload at `root` that replace something in vLLM without a kernel of their own."""
    path, with_kernels = root / "manifest.toml", ops_of(root)
    named = manifest.load(path).ops if path.is_file() else ()
    return tuple(sorted(op.name for op in named if op.replaces and op.name not in with_kernels))


def languages_of(root: Path, op: str) -> tuple[str, ...]:
    """What the op's kernels are written in: `triton`, `tilelang`."""
    known = ("triton", "tilelang")
    return tuple(name for name in known if (root / "ops" / op / f"{name}.py").is_file())


def verify(request: Request, on_event: OnEvent | None = None) -> VerifyReport:
    """Runs what was asked for.

    Args:
        request: what to verify.
        on_event: called with every result, and with every level that cannot run, as it comes.

    Raises:
        UsageError: an op or a case that the payload does not have.
        FailedError: the payload changed meanwhile.
    """
    digest, ops = payload.load(request.payload_root).digest, _chosen_ops(request)
    # ops share kernels
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        run = _Run(request, digest, ops, runner.shared_caches(folder))
        if not (request.ops or request.case) and (bare := bindings_only(request.payload_root)):
            run.notes.append(f"no kernel of its own, checked by level live: {', '.join(bare)}")
        return _verify(run, on_event)


def _verify(run: _Run, on_event: OnEvent | None) -> VerifyReport:
    began, request = time.perf_counter(), run.request
    levels = request.levels or tuple(Level)
    if any(level is not Level.STATIC for level in levels):
        run.found = runner.probe(request.python)
    results: list[CaseResult] = []
    not_run: list[NotRun] = []
    for outcome in _outcomes(run, [level for level in Level if level in levels]):
        if isinstance(outcome, NotRun):
            not_run.append(outcome)
        elif request.case in (None, outcome.case) or outcome.case == f"{outcome.op}[start]":
            results.append(outcome)
        else:
            continue
        if on_event is not None:
            on_event(outcome)
    if request.case is not None and not results and not not_run:
        raise _no_case(request)
    if request.case is not None and results:
        levels_of_case = {result.level for result in results} | set(request.levels)
        if levels_of_case & _SHARE_CASES:
            levels_of_case |= _SHARE_CASES
        not_run = [item for item in not_run if item.level in levels_of_case]
    return VerifyReport(
        tuple(results), tuple(not_run), {"root": str(request.payload_root), "digest": run.digest},
        tuple(run.notes), time.perf_counter() - began, seconds_of(run.took),
    )  # fmt: skip


def _outcomes(run: _Run, levels: list[Level]) -> Iterator[CaseResult | NotRun]:
    """Those of all levels, in order; what works on the processor and what works on the GPU run side by side."""

    def outcomes(level: Level, crew: runner.Crew) -> Iterator[CaseResult | NotRun]:
        run.crew = crew  # the same for all that run side by side
        began = time.perf_counter()
        yield from _LEVELS[level](run)
        run.took.append((level, "", time.perf_counter() - began))

    workers = [level for level in levels if level not in (Level.STATIC, Level.LIVE)]
    roomy = (os.cpu_count() or 1) > _MOST_AT_ONCE
    for group in ([Level.STATIC], workers, [Level.LIVE]):
        asked = [level for level in group if level in levels]
        yield from runner.side_by_side(asked, outcomes, len(asked) if roomy else 1)


def seconds_of(took: Iterable[tuple[Level, str, float]]) -> tuple[tuple[Level, str, float], ...]:
    """Level, op and seconds; of an op with several workers from the start of each to its end, added up.

    The op of a level's own time is empty.
    """
    found: dict[tuple[Level, str], float] = {}
    for level, op, seconds in took:
        found[level, op] = found.get((level, op), 0.0) + seconds
    order = list(Level)
    pairs = sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return tuple((level, op, seconds) for (level, op), seconds in pairs)


def _chosen_ops(request: Request) -> tuple[str, ...]:
    known = ops_of(request.payload_root)
    wanted = request.ops or ((request.case.partition("[")[0],) if request.case else ())
    unknown = sorted(set(wanted) - set(known) - ({liverun.OP} if request.case else set()))
    if unknown and not request.ops and not set(unknown) & set(bindings_only(request.payload_root)):
        raise _no_case(request)
    if unknown:
        check_known(unknown, request.payload_root, f"level {Level.LIVE.value} checks that it is bound")
    return tuple(op for op in known if not wanted or op in wanted)


def _no_case(request: Request) -> UsageError:
    return UsageError(
        f"there is no case {request.case}", code="case-unknown", hint="`deepinfer verify --json` lists them"
    )


def check_known(missing: list[str], root: Path, instead: str) -> None:
    """Why the ops in `missing` have no cases.

    Args:
        missing: names of no op with workloads; not empty.
        instead: what can be done with an op that has no kernel, as a hint.

    Raises:
        UsageError: always. `op-without-kernel`: it is bindings alone; `op-unknown`: there is no such op.
    """
    bare = bindings_only(root)
    unknown = [op for op in missing if op not in bare]
    if unknown:
        raise UsageError(
            f"there is no op {', '.join(unknown)}",
            code="op-unknown",
            hint=f"ops are {', '.join(ops_of(root))}; without a kernel of their own: {', '.join(bare) or 'none'}",
        )
    names = ", ".join(missing)
    raise UsageError(f"{names} has no kernel of its own, so no case", code="op-without-kernel", hint=instead)


def _static(run: _Run) -> Iterator[CaseResult | NotRun]:
    if run.request.target is None:
        yield NotRun(
            Level.STATIC, "no vLLM was found, so there is no install to check",
            "name one with --target or --python; `deepinfer install --wheel 0.33.0 --into DIR` fetches one",
        )  # fmt: skip
        return
    from deepinfer_cli.validate import static

    yield from static.check_target(run.request.target)


def _compile(run: _Run) -> Iterator[CaseResult | NotRun]:
    missing = _missing(run, "triton", "torch")
    if missing:
        yield NotRun(Level.COMPILE, missing, _install(run, "torch", "triton", *_tile_tools(run)))
        return
    tiled = [op for op in run.ops if "tilelang" in run.languages(op)]
    without = _without_tilelang(run) if tiled else None
    if without is not None:
        yield NotRun(Level.COMPILE, f"TileLang kernels of {', '.join(tiled)}: {without[0]}", without[1])
    cores = os.cpu_count() or 1
    # a worker for each architecture, where there are cores for them
    parts = [(arch,) for arch in run.request.archs] if cores > _MOST_AT_ONCE else [run.request.archs]
    jobs = []
    for op in run.ops:
        languages = [name for name in run.languages(op) if without is None or name != "tilelang"]
        complete = len(languages) == len(run.languages(op))
        more = {"languages": languages, "complete": complete}
        if languages:
            jobs += [run.job("compile", Level.COMPILE, op, {}, archs=list(part), **more) for part in parts]
    yield from run.run(jobs, min(_MOST_AT_ONCE, cores - 1))


def _without_tilelang(run: _Run) -> tuple[str, str] | None:
    """Why TileLang kernels cannot be built there, and what to do about it."""
    missing = _missing(run, "tilelang", "nvcc")
    return (missing, _install(run, "tilelang", "nvcc")) if missing else None


def _tile_tools(run: _Run) -> tuple[str, ...]:
    """What the ops that are asked for need beside torch and triton."""
    return ("tilelang", "nvcc") if any("tilelang" in run.languages(op) for op in run.ops) else ()


def _install(run: _Run, *names: str) -> str:
    """How to get all that is lacking of `names`, so that the next run lacks nothing."""
    other = "name an interpreter with --python"
    if "problem" in run.found:
        return f"{other} that can be started"
    packages = [name for name in names if name != "nvcc" and not run.found.get(name)]
    steps = [f"install {joined(packages)} there (pip install {' '.join(packages)})"] if packages else []
    if "nvcc" in names and not run.found.get("nvcc"):
        steps.append(toolkit.HOW)
    return f"{'; '.join(steps)}; or {other}"


def _interpreter(run: _Run) -> Iterator[CaseResult | NotRun]:
    missing = _missing(run, "torch", "triton", "numpy")
    if missing:
        yield NotRun(Level.INTERPRETER, missing, _install(run, "torch", "triton", "numpy"))
        return
    env = {
        "TRITON_INTERPRET": "1", "DEEPINFER_FORCE_ARCH": run.request.arch or ARCHS[0], "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    reason = (
        "only Triton kernels have an interpreter: the compile gate builds these, numerics runs them on a GPU"
    )
    # an op without kernel files makes its own
    without = [op for op in run.ops if run.languages(op) and "triton" not in run.languages(op)]
    for op in without:
        yield _skipped_op(run, op, Level.INTERPRETER, reason)
    cores = os.cpu_count() or 1
    at_once = min(_MOST_AT_ONCE, cores - 1)
    parts = _PARTS if cores > _MOST_AT_ONCE and run.request.case is None else 1
    # each would take all cores for what torch does between the kernels
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, cores // max(1, at_once)))
    jobs = [
        run.job("cases", Level.INTERPRETER, op, env, part=[part, parts])
        for op in run.ops
        if op not in without
        for part in range(parts)
    ]
    yield from run.run(jobs, at_once)


def _skipped_op(run: _Run, op: str, level: Level, reason: str) -> CaseResult:
    return CaseResult(run.request.case or f"{op}[{level.value}]", op, level, Status.SKIPPED, reason)


def _numerics(run: _Run) -> Iterator[CaseResult | NotRun]:
    missing = _missing(run, "torch", "triton") or _no_gpu(run)
    if missing:
        no_packages = _missing(run, "torch", "triton")
        how = _install(run, "torch", "triton", *_tile_tools(run)) if no_packages else _ELSEWHERE
        yield NotRun(Level.NUMERICS, missing, how)
        return
    forced, problem = forced_arch(run.found["gpu"], run.request.arch)
    if problem:
        yield NotRun(Level.NUMERICS, problem, _other_arch(run.found["gpu"], "run the Ampere code"))
        return
    env = {"DEEPINFER_FORCE_ARCH": forced, "TRITON_OVERRIDE_ARCH": forced} if forced else {}
    run.notes.append(f"numerics: {code_name(run.found['gpu'], forced)}")
    without = _without_tilelang(run)
    tiled = [op for op in run.ops if without is not None and "tilelang" in run.languages(op)]
    if without is not None and tiled:
        # an op that also has Triton kernels takes those then: they are checked, and what is not is said
        yield NotRun(Level.NUMERICS, f"TileLang kernels of {', '.join(tiled)}: {without[0]}", without[1])
    threads = 0 if run.request.case else max(1, min(_TILE_THREADS, (os.cpu_count() or 1) // 2))
    jobs = [
        run.job(
            "cases",
            Level.NUMERICS,
            op,
            env,
            languages=list(run.languages(op)),
            threads=0 if op in tiled else threads,
        )
        for op in run.ops
        if op not in tiled or "triton" in run.languages(op)
    ]
    ran: dict[str, set[str]] = {}
    for result in run.run(jobs, _gpu_at_once(run)):
        if "language" in result.extra:
            ran.setdefault(result.op, set()).add(result.extra["language"])
        yield result
    # a part of the cases may be Triton's; all of them are not a check of the other kernels
    lacking = [op for op, languages in ran.items() if op not in tiled and "tilelang" not in languages]
    if lacking and run.request.case is None:
        reason = f"TileLang kernels of {', '.join(lacking)}: no case launched one"
        yield NotRun(Level.NUMERICS, reason, "see whether tilelang can be imported there")


def _gpu_at_once(run: _Run) -> int:
    """How many workers share the card: starting and compiling takes longer than what they do on it."""
    cores, memory = os.cpu_count() or 1, int(run.found["gpu"].get("memory_bytes", 0))
    if run.request.suite == "smoke":
        return max(1, min(cores, memory // _SMOKE_WORKER_BYTES))
    return min(_GPU_AT_ONCE, cores) if memory >= _ROOMY_BYTES else 1


def _live(run: _Run) -> Iterator[CaseResult | NotRun]:
    target, request = run.request.target, run.request
    missing = _missing(run, "torch") or _no_gpu(run)
    if target is None or target.layout is None:
        yield NotRun(
            Level.LIVE, "there is no vLLM with DeepSeek-V4.1 to import", "name one with --target or --python"
        )
        return
    if missing:
        how = "name with --python the interpreter that runs this vLLM, on the machine that serves it"
        yield NotRun(Level.LIVE, missing, how)
        return
    forced, problem = forced_arch(run.found["gpu"], request.arch)
    if problem:
        yield NotRun(Level.LIVE, problem, _other_arch(run.found["gpu"], "bind the overlay"))
        return
    from deepinfer_cli.validate import static

    modules = static.hooked_modules(target)
    if not modules:
        yield NotRun(Level.LIVE, "the overlay is not installed in this vLLM", "deepinfer install")
        return
    skip = _skipped(target)
    own = target.kind is TargetKind.ENVIRONMENT and target.python == request.python
    # not every op takes the place of a stock function: some serve other ops
    bound = manifest.load(request.payload_root / "manifest.toml").ops
    job = liverun.LiveJob(
        request.python, None if own else target.parent, target.layout, modules,
        tuple(sorted({op.name for op in bound if op.replaces} - set(skip))), skip, forced, request.timeout_s,
    )  # fmt: skip
    results, not_run = liverun.run(job)
    yield from results
    if not_run is not None:
        yield not_run


_LEVELS: dict[Level, Callable[[_Run], Iterator[CaseResult | NotRun]]] = {
    Level.STATIC: _static,
    Level.COMPILE: _compile,
    Level.INTERPRETER: _interpreter,
    Level.NUMERICS: _numerics,
    Level.LIVE: _live,
}


def _skipped(target: Target) -> tuple[str, ...]:
    from deepinfer_cli.overlay.inspect import inspect

    return tuple(inspect(target).skip)


def _missing(run: _Run, *names: str) -> str:
    if "problem" in run.found:
        return f"{run.request.python} cannot be asked: {run.found['problem']}"
    lacking = [name for name in names if not run.found.get(name)]
    return f"{run.request.python} has no {' and no '.join(lacking)}" if lacking else ""


def _no_gpu(run: _Run) -> str:
    gpu = run.found.get("gpu")
    if gpu is None:
        return "torch sees no CUDA GPU here"
    return f"torch cannot use the GPU: {gpu['problem']}" if "problem" in gpu else ""


def forced_arch(gpu: dict[str, Any], arch: str | None) -> tuple[str | None, str]:
    """The architecture to force on this card (None on an SM8x card), or why the code asked for cannot run here."""
    capability = tuple(gpu["capability"])
    if capability in SERVED:
        own = SERVED[capability]
        other = arch not in (None, own)
        return None, f"{gpu['name']} is {own} and runs its own code, not {arch}'s" if other else ""
    text = ".".join(str(part) for part in capability)
    if capability < (8, 0) or capability == (8, 7):
        return None, f"{gpu['name']} has compute capability {text}, which no overlay kernel serves"
    arch = arch or os.environ.get("DEEPINFER_FORCE_ARCH", "").strip().lower() or None
    if arch is None:
        return None, f"{gpu['name']} has compute capability {text}: stock vLLM is the better path there"
    if arch not in ARCHS:
        return None, f"DEEPINFER_FORCE_ARCH={arch} is unknown; known are {', '.join(ARCHS)}"
    return arch, ""


def _other_arch(gpu: dict[str, Any], purpose: str) -> str:
    served = tuple(gpu["capability"]) in SERVED
    return "leave --arch out" if served else f"pass --arch sm80 to {purpose} on this card"


def code_name(gpu: dict[str, Any], forced: str | None) -> str:
    """Whose code runs on what, such as `sm80 code on NVIDIA H200`."""
    return f"{forced or SERVED[tuple(gpu['capability'])]} code on {gpu['name']}"
