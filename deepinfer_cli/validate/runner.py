"""Starts workers, watches them, and turns a crash or a hang into a result."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from deepinfer_cli.errors import FailedError
from deepinfer_cli.validate.model import CaseResult, Level, Status

Result = TypeVar("Result")
Work = TypeVar("Work")

WORKER = Path(__file__).with_name("worker.py")
DEFAULT_TIMEOUT_S = 300.0
_TAIL_CHARS = 4000
# what this process was given must not decide what a worker tests
_CLEARED = (
    "TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH", "PYTHONSTARTUP",
    "DEEPINFER_DISABLE", "DEEPINFER_DISABLE_OPS", "DEEPINFER_FORCE_ARCH",
)  # fmt: skip

# variables that name the folder of a compile cache
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")


def shared_caches(folder: str) -> dict[str, str]:
    """Variables that let several workers share the compile caches in `folder`; the user's own come first."""
    return {name: folder for name in CACHES if name not in os.environ}


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's work.

    Attributes:
        python: interpreter of the worker.
        request: the JSON request, without `cases`.
        env: variables added to this process's.
        timeout_s: for one case; start-up (imports, compiling) has as long again.
        path: folders put in front of the worker's `PYTHONPATH`.
        fresh: compile caches (of `CACHES`) that begin empty, whatever the user has set.
    """

    python: Path
    request: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    path: tuple[Path, ...] = ()
    fresh: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """The level its results belong to."""
        return Level(self.request.get("level", Level.NUMERICS.value))


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended.

    Attributes:
        status: PASSED when it said it was done, TIMEOUT, or RUNTIME_ERROR.
        reason: exit code or signal in words.
        stderr: the tail of what it printed.
    """

    status: Status
    reason: str = ""
    stderr: str = ""


class Crew:
    """The workers of several threads, so that one call ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._parts: list[Crew] = []
        self.stopped = False

    def part(self) -> Crew:
        """A crew that can be ended alone, and ends with this one."""
        crew = Crew()
        with self._lock:
            crew.stopped = self.stopped
            self._parts.append(crew)
        return crew

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a worker.

        Raises:
            FailedError: the crew was stopped.
        """
        with self._lock:
            if self.stopped:
                raise FailedError("the run was stopped", code="worker-crashed")
            process = subprocess.Popen(command, **options)
            self._processes.add(process)
            return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Ends one worker and everything it started."""
        kill_group(process)
        with self._lock:
            self._processes.discard(process)

    def stop(self) -> None:
        """Ends all workers; none starts any more."""
        with self._lock:
            self.stopped = True
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            parts = tuple(self._parts)
        for part in parts:
            part.stop()


def events(
    job: Job, cases: list[str] | None = None, crew: Crew | None = None
) -> Iterator[dict[str, Any] | WorkerEnd]:
    """Runs one worker: yields its events as they come, and a `WorkerEnd` last. Its process group never survives."""
    crew = crew or Crew()
    env = {name: value for name, value in os.environ.items() if name not in _CLEARED} | job.env
    if job.path:
        env["PYTHONPATH"] = os.pathsep.join([*map(str, job.path), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder, tempfile.TemporaryFile() as stderr:
        env.update({name: folder for name in CACHES if name in job.fresh or name not in env})
        process = crew.start(
            [str(job.python), str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env, start_new_session=True,
        )  # fmt: skip
        try:
            yield from _listen(process, job, json.dumps(job.request | {"cases": cases}), stderr)
        finally:
            crew.end(process)


def _listen(
    process: subprocess.Popen[bytes], job: Job, request: str, stderr: IO[bytes]
) -> Iterator[dict[str, Any] | WorkerEnd]:
    lines: queue.Queue[bytes | None] = queue.Queue()
    assert process.stdin is not None and process.stdout is not None
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(request.encode())
    done = False
    while True:
        try:
            line = lines.get(timeout=job.timeout_s)
        except queue.Empty:
            yield WorkerEnd(Status.TIMEOUT, f"no result within {job.timeout_s:g} s", _tail(stderr))
            return
        if line is None:
            break
        event = _event(line)
        if event is not None:
            done = done or event["event"] == "done"
            yield event
    code = process.wait()
    if done and code == 0:
        yield WorkerEnd(Status.PASSED)
    else:
        yield WorkerEnd(Status.RUNTIME_ERROR, f"the worker {exit_words(code)}", _tail(stderr))


def _event(line: bytes) -> dict[str, Any] | None:
    """None for a line that a death cut off, and for what the interpreter's start-up files print."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    return None


def _pump(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def exit_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _tail(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _TAIL_CHARS))
    return stderr.read().decode(errors="replace").strip()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker and everything it started; fine if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def run_many(
    jobs: Sequence[Job],
    cases: list[str] | None,
    at_once: int,
    within: Crew | None = None,
    on_end: Callable[[Job, float], None] | None = None,
) -> Iterator[CaseResult]:
    """`run_cases` of every job, up to `at_once` side by side; results come in the order of the jobs.

    Args:
        within: the crew whose end ends these workers too.
        on_end: called, in any thread, with each job and the seconds it took, start-up included.

    Raises:
        FailedError: a worker tested other bytes than it was asked to.
    """

    def results(job: Job, crew: Crew) -> Iterator[CaseResult]:
        began = time.perf_counter()
        yield from run_cases(job, cases, crew)
        if on_end is not None:
            on_end(job, time.perf_counter() - began)

    return side_by_side(jobs, results, at_once, within)


def side_by_side(
    jobs: Sequence[Work],
    results: Callable[[Work, Crew], Iterable[Result]],
    at_once: int,
    within: Crew | None = None,
) -> Iterator[Result]:
    """`results` of every job, up to `at_once` side by side, in the order of the jobs; what one raises is raised here."""
    crew = Crew() if within is None else within.part()
    places = threading.BoundedSemaphore(max(1, at_once))
    if min(at_once, len(jobs)) < 2:
        for job in jobs:
            yield from results(job, crew)
        return
    lines: list[queue.Queue[Result | _Raised | None]] = [queue.Queue() for _ in jobs]

    def work(job: Work, line: queue.Queue[Result | _Raised | None]) -> None:
        try:
            with places:
                for result in results(job, crew):
                    line.put(result)
        except BaseException as error:  # it is the caller's
            line.put(_Raised(error))
        line.put(None)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, lines, strict=True)]
    try:
        for thread in threads:
            thread.start()
        for line in lines:
            while (item := line.get()) is not None:
                if isinstance(item, _Raised):
                    raise item.error
                yield item
    finally:
        crew.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def run_cases(job: Job, cases: list[str] | None = None, crew: Crew | None = None) -> Iterator[CaseResult]:
    """Every case of one op, through as many workers as crashes and hangs make necessary.

    A case that was running when its worker died gets the blame; those after it start in a new worker.

    Raises:
        FailedError: a worker tested other bytes than it was asked to.
    """
    op = job.request["op"]
    while True:
        running: str | None = None
        planned: list[str] | None = None
        restart = False
        end = WorkerEnd(Status.RUNTIME_ERROR, "the worker said nothing")
        for event in events(job, cases, crew):
            if isinstance(event, WorkerEnd):
                end = event
            elif event["event"] == "hello":
                require_digest(job, event)
            elif event["event"] == "plan":
                planned = list(event["cases"])
            elif event["event"] == "start":
                running = event["case"]
            elif event["event"] == "restart":
                restart = True
            elif event["event"] == "result":
                result = CaseResult.from_json(event["result"])
                running = None
                if planned and result.case in planned:
                    planned.remove(result.case)
                yield result
        if end.status is Status.PASSED and not planned:
            return
        if restart and planned:
            cases = planned
            continue
        if end.status is Status.PASSED:
            end = WorkerEnd(Status.RUNTIME_ERROR, "the worker ended without a result for every case")
        blamed = running or f"{op}[start]"
        yield CaseResult(
            blamed, op, job.level, end.status, end.reason, extra={"stderr": end.stderr} if end.stderr else {}
        )
        # a worker that died before or between cases would die again
        if planned is None or running is None:
            for name in planned or ():
                yield CaseResult(name, op, job.level, Status.RUNTIME_ERROR, f"not reached: {end.reason}")
            return
        cases = [name for name in planned if name != running]
        if not cases:
            return


def require_digest(job: Job, hello: dict[str, Any]) -> None:
    """Refuses a worker that tests other bytes, or another file, than it was asked to.

    Raises:
        FailedError: it does.
    """
    wanted, root = job.request["digest"], Path(job.request["payload"])
    loaded = Path(str(hello["file"])).resolve()
    if hello["digest"] != wanted or loaded != (root / "__init__.py").resolve():
        raise FailedError(
            f"the worker loaded {loaded} with digest {hello['digest']}, not {root} with {wanted}",
            code="payload-mismatch",
            hint="the overlay changed while it was being checked; run the command again",
        )


def probe(python: Path, path: tuple[Path, ...] = (), timeout_s: float = 120.0) -> dict[str, Any]:
    """What an interpreter has (see `worker.probe`); `{"problem": …}` where it cannot be asked."""
    job = Job(python, {"task": "probe"}, timeout_s=timeout_s, path=path)
    try:
        for event in events(job):
            if isinstance(event, WorkerEnd):
                return {"problem": f"{event.reason}: {event.stderr[-300:]}"}
            if event["event"] == "probe":
                return event
    except OSError as error:
        return {"problem": f"{python}: {error}"}
    return {"problem": "no answer"}
