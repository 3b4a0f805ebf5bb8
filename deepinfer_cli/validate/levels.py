"""The levels of `verify`: what each needs, what it starts, and why it cannot run where it cannot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.overlay import manifest
from deepinfer_cli.render import joined
from deepinfer_cli.validate import liverun, toolkit
from deepinfer_cli.validate.forced import ARCHS, code_name, forced_arch, other_arch
from deepinfer_cli.validate.model import CaseResult, Level, NotRun, Status
from deepinfer_cli.validate.request import Run

_ELSEWHERE = "run it on the machine that serves vLLM"
# more workers than this at once would wait for each other
MOST_AT_ONCE = 8
_GPU_AT_ONCE = 4
# what one worker of the smoke suite may take of a card: its context, and small cases
_SMOKE_WORKER_BYTES = 3 * 10**9
_TILE_THREADS = 4
# an op's cases in the interpreter, where there are cores for several workers
_PARTS = 3
# with less memory, cases that run side by side could take it from each other
_ROOMY_BYTES = 80 * 10**9


def _static(run: Run) -> Iterator[CaseResult | NotRun]:
    if run.request.target is None:
        yield NotRun(
            Level.STATIC, "no vLLM was found, so there is no install to check",
            "name one with --target or --python; `deepinfer install --wheel 0.33.0 --into DIR` fetches one",
        )  # fmt: skip
        return
    from deepinfer_cli.validate import static

    yield from static.check_target(run.request.target)


def _compile(run: Run) -> Iterator[CaseResult | NotRun]:
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
    parts = [(arch,) for arch in run.request.archs] if cores > MOST_AT_ONCE else [run.request.archs]
    jobs = []
    for op in run.ops:
        languages = [name for name in run.languages(op) if without is None or name != "tilelang"]
        complete = len(languages) == len(run.languages(op))
        more = {"languages": languages, "complete": complete}
        if languages:
            jobs += [run.job("compile", Level.COMPILE, op, {}, archs=list(part), **more) for part in parts]
    yield from run.run(jobs, min(MOST_AT_ONCE, cores - 1))


def _without_tilelang(run: Run) -> tuple[str, str] | None:
    """Why TileLang kernels cannot be built there, and what to do about it."""
    missing = _missing(run, "tilelang", "nvcc")
    return (missing, _install(run, "tilelang", "nvcc")) if missing else None


def _tile_tools(run: Run) -> tuple[str, ...]:
    """What the ops that are asked for need beside torch and triton."""
    return ("tilelang", "nvcc") if any("tilelang" in run.languages(op) for op in run.ops) else ()


def _install(run: Run, *names: str) -> str:
    """How to get all that is lacking of `names`, so that the next run lacks nothing."""
    other = "name an interpreter with --python"
    if "problem" in run.found:
        return f"{other} that can be started"
    packages = [name for name in names if name != "nvcc" and not run.found.get(name)]
    steps = [f"install {joined(packages)} there (pip install {' '.join(packages)})"] if packages else []
    if "nvcc" in names and not run.found.get("nvcc"):
        steps.append(toolkit.HOW)
    return f"{'; '.join(steps)}; or {other}"


def _interpreter(run: Run) -> Iterator[CaseResult | NotRun]:
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
    at_once = min(MOST_AT_ONCE, cores - 1)
    parts = _PARTS if cores > MOST_AT_ONCE and run.request.case is None else 1
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


def _skipped_op(run: Run, op: str, level: Level, reason: str) -> CaseResult:
    return CaseResult(run.request.case or f"{op}[{level.value}]", op, level, Status.SKIPPED, reason)


def _numerics(run: Run) -> Iterator[CaseResult | NotRun]:
    missing = _missing(run, "torch", "triton") or _no_gpu(run)
    if missing:
        no_packages = _missing(run, "torch", "triton")
        how = _install(run, "torch", "triton", *_tile_tools(run)) if no_packages else _ELSEWHERE
        yield NotRun(Level.NUMERICS, missing, how)
        return
    forced, problem = forced_arch(run.found["gpu"], run.request.arch)
    if problem:
        yield NotRun(Level.NUMERICS, problem, other_arch(run.found["gpu"], "run the Ampere code"))
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


def _gpu_at_once(run: Run) -> int:
    """How many workers share the card: starting and compiling takes longer than what they do on it."""
    cores, memory = os.cpu_count() or 1, int(run.found["gpu"].get("memory_bytes", 0))
    if run.request.suite == "smoke":
        return max(1, min(cores, memory // _SMOKE_WORKER_BYTES))
    return min(_GPU_AT_ONCE, cores) if memory >= _ROOMY_BYTES else 1


def _live(run: Run) -> Iterator[CaseResult | NotRun]:
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
        yield NotRun(Level.LIVE, problem, other_arch(run.found["gpu"], "bind the overlay"))
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


def _skipped(target: Target) -> tuple[str, ...]:
    from deepinfer_cli.overlay.inspect import inspect

    return tuple(inspect(target).skip)


def _missing(run: Run, *names: str) -> str:
    if "problem" in run.found:
        return f"{run.request.python} cannot be asked: {run.found['problem']}"
    lacking = [name for name in names if not run.found.get(name)]
    return f"{run.request.python} has no {' and no '.join(lacking)}" if lacking else ""


def _no_gpu(run: Run) -> str:
    gpu = run.found.get("gpu")
    if gpu is None:
        return "torch sees no CUDA GPU here"
    return f"torch cannot use the GPU: {gpu['problem']}" if "problem" in gpu else ""


LEVELS: dict[Level, Callable[[Run], Iterator[CaseResult | NotRun]]] = {
    Level.STATIC: _static,
    Level.COMPILE: _compile,
    Level.INTERPRETER: _interpreter,
    Level.NUMERICS: _numerics,
    Level.LIVE: _live,
}
