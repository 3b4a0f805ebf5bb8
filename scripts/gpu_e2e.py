"""The end-to-end matrix on a GPU: several small models at once on one card, through real vLLM releases.

    python scripts/gpu_e2e.py --site 0.33.0=/tmp/site_0.33.0 [--site 0.30.0=...] --output DIR
        [--only NAME,NAME] [--gpus N] [--at-once N] [--timeout SECONDS] [--work DIR] [--list]
    python scripts/gpu_e2e.py --from RUNS.tar.gz [--from RUNS.tar.gz] --output DIR

A site is a folder that holds an untouched `vllm` and what it needs; the overlay goes into a copy of hard links, which
an install breaks one by one. Run it with an interpreter that can import the sites, from this repository's root.

What runs is in `gpu_e2e_jobs.py`, what is made of it in `gpu_e2e_summary.py`. Two engines, with all ops and with the enable group alone, start first and one after the
other, so that vLLM's own measurement of memory is not disturbed; they wait and are timed in turns when all others are
done. The others share the card, up to `--at-once`, with a fixed KV cache; of several cards the last one is kept free
until those two have started.

DIR gets summary.json and runs.tar.gz (a document, a log and the recorded kernels of each run), both after every run,
so a command that is stopped leaves what it has. The exit code is 0 if everything was as it must be. `--from` makes
summary.json anew from the documents of earlier runs, a later archive's in place of an earlier one's.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepinfer_cli.validate import runner  # noqa: E402
from deepinfer_cli.validate.e2e import drive, plan  # noqa: E402
from scripts.compile_recorded import documents  # noqa: E402
from scripts.gpu_e2e_jobs import QUIET, STARTED, Job, make_jobs  # noqa: E402
from scripts.gpu_e2e_summary import summary as summarized  # noqa: E402


def main() -> int:
    """Run the matrix and write what it showed."""
    options = _options()
    sites = dict(text.split("=", 1) for text in options.site)
    groups = plan.groups_of(ROOT / "overlays" / "deepinfer_sm80")
    jobs = make_jobs(options.work, groups)
    if options.archives:
        return _summarize(options, jobs)
    options.work.mkdir(parents=True, exist_ok=True)
    wanted = [job for job in jobs if job.version in sites and _chosen(job, options)]
    if options.list or not wanted:
        print("\n".join(f"{job.run.name:24} {job.version}  {job.run.configuration.what}" for job in jobs))
        return 0 if options.list else 2
    matrix = Matrix(options, _prepare(options, sites, wanted), wanted)
    return 0 if matrix.run()["ok"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", action="append", default=[], metavar="VERSION=FOLDER")
    parser.add_argument("--from", dest="archives", type=Path, action="append", default=[], metavar="RUNS")
    parser.add_argument("--output", type=Path, default=Path("e2e"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/deepinfer-e2e"))
    parser.add_argument("--only", default="", help="names or beginnings of names, separated by commas")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a child may take")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def _summarize(options: argparse.Namespace, jobs: list[Job]) -> int:
    found = {name: one for path in options.archives for name, one in documents(path).items()}
    matrix = Matrix(options, {}, [job for job in jobs if job.run.name in found])
    matrix.documents = found
    return 0 if matrix.write_summary()["ok"] else 1


def _chosen(job: Job, options: argparse.Namespace) -> bool:
    names = [name for name in options.only.split(",") if name]
    return job.run.configuration.gpus <= options.gpus and (not names or job.run.name.startswith(tuple(names)))


def _prepare(
    options: argparse.Namespace, sites: dict[str, str], jobs: list[Job]
) -> dict[tuple[str, bool], Path]:
    """Where each version is, untouched and with the overlay."""
    for name in (STARTED, QUIET):
        (options.work / name).unlink(missing_ok=True)
    found = {(version, False): Path(folder).resolve() for version, folder in sites.items()}
    for version in sorted({job.version for job in jobs if job.overlay}):
        copy = options.work / f"site-{version}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(found[version, False], copy, copy_function=_link, symlinks=True)
        command = ["install", "--yes", "--no-verify", "--target", str(copy), "--arch", "sm80"]
        done = subprocess.run(
            [sys.executable, "-m", "deepinfer_cli", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{version}: {(done.stdout + done.stderr).strip().splitlines()[-1:]}", flush=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found[version, True] = copy
    return found


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


class Matrix:
    """The jobs under way, their documents, and the files that say how far it is."""

    def __init__(
        self, options: argparse.Namespace, places: dict[tuple[str, bool], Path], jobs: list[Job]
    ) -> None:
        self.options, self.places, self.jobs = options, places, jobs
        self.documents: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.crew = runner.Crew()
        self.started = {job.run.name: threading.Event() for job in jobs}
        self.free = threading.Event()  # the last card

    def run(self) -> dict[str, Any]:
        """Runs all jobs: the ones that want quiet start alone, the others share the card. The summary."""
        alone = [job for job in self.jobs if job.alone]
        threads = [
            threading.Thread(target=self._run, args=(job, self.options.gpus - 1), daemon=True)
            for job in alone
        ]
        first = threading.Thread(target=self._start_alone, args=(alone, threads), daemon=True)
        first.start()
        if self.options.gpus == 1:
            self.free.wait()
        line: queue.Queue[Job] = queue.Queue()
        rest = [job for job in self.jobs if not job.alone]
        for job in rest:
            line.put(job)
        workers = [
            threading.Thread(target=self._work, args=(line, index), daemon=True)
            for index in range(self.options.at_once)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.say("all others are done")
        (self.options.work / QUIET).touch()
        for thread in (first, *threads):
            thread.join()
        return self.write()

    def _start_alone(self, jobs: list[Job], threads: list[threading.Thread]) -> None:
        for job, thread in zip(jobs, threads, strict=True):
            thread.start()
            self.started[job.run.name].wait(self.options.timeout)
        (self.options.work / STARTED).touch()
        self.free.set()

    def _work(self, line: queue.Queue[Job], index: int) -> None:
        if index % self.options.gpus == self.options.gpus - 1:
            self.free.wait()
        while True:
            try:
                job = line.get_nowait()
            except queue.Empty:
                return
            if job.run.configuration.gpus > 1:
                self.free.wait()
            self._run(job, index)

    def _run(self, job: Job, index: int = 0) -> None:
        name = job.run.name
        run = replace(job.run, parent=self.places[job.version, job.overlay])
        if self.options.gpus > 1 and run.configuration.gpus == 1:
            env = {**run.configuration.env, "CUDA_VISIBLE_DEVICES": str(index % self.options.gpus)}
            run = replace(run, configuration=replace(run.configuration, env=env))
        timeout = self.options.timeout * (4 if job.alone else 1)
        folder = self.options.work / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        try:
            document = drive.run(run, Path(sys.executable), folder, timeout, self._event, self.crew)
        except Exception as error:  # the others go on
            self.say(f"{name}: {type(error).__name__}: {error}")
            self.started[name].set()
            return
        self.started[name].set()
        document["version"] = job.version
        with self.lock:
            self.documents[name] = document
        if document["complete"]:
            self.say(f"{name}: complete in {document['seconds']} s; steps {document['steps']}")
        else:
            self.say(f"{name}: NOT COMPLETE after {document['seconds']} s: {drive.why_failed(document)}")
            print("\n".join(f"    | {text[:240]}" for text in document["tail"][-14:]), flush=True)
        self.write()

    def _event(self, run: plan.Run, event: dict[str, Any]) -> None:
        if event["event"] == "answer":
            self.started[run.name].set()
        if event["event"] in ("step", "error"):
            self.say(
                f"{run.name}: {event['event']} {event['step']}"
                + (f": {event['kind']}" if "kind" in event else "")
            )

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def write_summary(self) -> dict[str, Any]:
        """summary.json, as far as it is; the same as the result."""
        self.options.output.mkdir(parents=True, exist_ok=True)
        summary = summarized(self.jobs, self.documents)
        text = json.dumps(summary, indent=1) + "\n"
        (self.options.output / "summary.json").write_text(text, encoding="utf-8")
        return summary

    def write(self) -> dict[str, Any]:
        """summary.json, the result, and runs.tar.gz, as far as it is."""
        with self.lock:
            output = self.options.output
            summary = self.write_summary()
            part = output / "runs.tar.gz.part"
            with tarfile.open(part, "w:gz", compresslevel=1) as archive:
                for name, document in self.documents.items():
                    folder = self.options.work / "runs" / name
                    (folder / "document.json").write_text(json.dumps(document), encoding="utf-8")
                    for file in ("document.json", drive.LOG):
                        archive.add(folder / file, f"{name}/{file}")
            part.replace(output / "runs.tar.gz")
        return summary


if __name__ == "__main__":
    sys.exit(main())
