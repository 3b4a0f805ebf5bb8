"""The end-to-end matrix on a GPU: several small models at once on one card, through real vLLM releases.

    python scripts/gpu_e2e.py --site 0.33.0=/tmp/site_0.33.0 [--site 0.30.0=...] --output DIR
        [--only NAME,NAME] [--gpus N] [--at-once N] [--timeout SECONDS] [--work DIR] [--list]
    python scripts/gpu_e2e.py --from RUNS.tar.gz [--from RUNS.tar.gz] --output DIR

A site is a folder that holds an untouched `vllm` and what it needs; the overlay goes into a copy of hard links, which
an install breaks one by one. Run it with an interpreter that can import the sites, from this repository's root.

What runs is `_jobs` below. Two engines, with all ops and with the enable group alone, start first and one after the
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepinfer_cli.validate import runner  # noqa: E402
from deepinfer_cli.validate.e2e import compare, drive, plan  # noqa: E402
from scripts.compile_recorded import documents  # noqa: E402

MAIN = "0.33.0"
OLDER = ("0.32.0", "0.31.0", "0.30.0")
FAULTS = Path(__file__).with_name("gpu_e2e_faults.py")
FAULT_LENGTHS = [7, 513, 1_500, 3_000, 5_000]
FAULT_NAMES = (
    "unrotated decode",
    "previous index group",
    "sink dropped",
    "window off by one",
    "one scale ignored",
    "Engram skipped",
)
# files that children wait for
STARTED, QUIET = "started", "quiet"


@dataclass(frozen=True)
class Job:
    """One run of the matrix.

    Attributes:
        run: what the child does.
        version: the site it runs in.
        overlay: in the copy with the overlay; else in the untouched site.
        against: the run whose figures it is held to, or None.
        alone: starts before the others and one at a time, then waits for the end to be timed.
        check: what else must be true of its document; a sentence where it is not.
        refused: what its vLLM itself must refuse it with; empty where it must run.
    """

    run: plan.Run
    version: str = MAIN
    overlay: bool = True
    against: str | None = None
    alone: bool = False
    check: Callable[[dict[str, Any]], str] = lambda document: ""
    refused: str = ""


def main() -> int:
    """Run the matrix and write what it showed."""
    options = _options()
    sites = dict(text.split("=", 1) for text in options.site)
    groups = plan.groups_of(ROOT / "overlays" / "deepinfer_sm80")
    jobs = _jobs(options, groups)
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


def _jobs(options: argparse.Namespace, groups: dict[str, str]) -> list[Job]:
    """The whole matrix; the longest first."""
    memory, known = _memory_bytes(), plan.CONFIGURATIONS

    def make(
        name: str, configuration: str | plan.Configuration, arch: str | None = None, **more: Any
    ) -> plan.Run:
        chosen = known[configuration] if isinstance(configuration, str) else configuration
        # several children share the card: what vLLM would measure beside the others is of no use
        return plan.Run(
            name,
            chosen,
            arch=arch,
            generate=arch is not None,
            memory_bytes=memory,
            kv_bytes=plan.SHARED_KV_BYTES,
            bytecode=True,
            **more,
        )

    # the warm-up of stock's own kernels takes minutes where nothing is cached
    lazy = {"kernel_config": {"enable_jit_warmup": False}}
    only_enabled = plan.accelerating(groups)
    timed = replace(
        known["graphs"],
        phases=tuple(_held_back(phase, options) for phase in known["graphs"].phases),
        engine={**known["graphs"].engine, **lazy, "max_model_len": 34_000, "max_num_batched_tokens": 8_192},
    )
    faulty = replace(known["eager"], phases=(_fault_prompts("prompts"), *map(_fault_prompts, FAULT_NAMES)))
    quick = known["graphs"]
    stock_draft = replace(known["draft"], engine={**known["draft"].engine, **lazy})
    quick = replace(quick, phases=tuple(phase for phase in quick.phases if phase["do"] != "time"))
    stock = replace(quick, engine={**quick.engine, **lazy})
    replayless = replace(known["eager"], engine={**known["eager"].engine, "swa_bounded_replay": False})
    staged = replace(
        quick,
        what="two GPUs, pipeline of four and four layers, CUDA graphs",
        engine={**quick.engine, "pipeline_parallel_size": 2},
        gpus=2,
        env=known["pp2"].env,
    )
    return [
        Job(
            replace(make("timed-accelerate", timed, "sm80"), kv_bytes=None),
            against="stock-graphs",
            alone=True,
        ),
        Job(
            replace(make("timed-enable", timed, "sm80", off=only_enabled), kv_bytes=None),
            against="stock-graphs",
            alone=True,
        ),
        Job(make("stock-eager", "eager"), overlay=False),
        Job(make("sm80-eager", "eager", "sm80"), against="stock-eager"),
        Job(make("stock-graphs", stock), overlay=False),
        Job(make("faults", faulty, "sm80", plugin=FAULTS), against="stock-eager"),
        Job(make("stock-draft", stock_draft), overlay=False),
        Job(make("sm80-draft", "draft", "sm80"), against="stock-draft"),
        Job(make("sm86-graphs", quick, "sm86"), against="stock-graphs"),
        Job(make("stock-long", "long"), overlay=False),
        Job(make("sm80-long", "long", "sm80"), against="stock-long"),
        Job(make("native-off", stock, off_switch=False), against="stock-graphs", check=nothing_bound),
        Job(make("stock-again", stock), overlay=False, against="stock-graphs"),
        *(Job(make(f"sm80-{version}", "eager", "sm80"), version, against="stock-eager") for version in OLDER),
        # as where a pipeline is cut at the last KV source
        Job(make("sm80-no-replay", replayless, "sm80"), against="stock-eager"),
        Job(make("tp2-stock", "tp2"), overlay=False),
        Job(make("tp2-sm80", "tp2", "sm80"), against="tp2-stock", check=exchanges_in_order),
        # stock starts no pipeline of V4.1: its figures of one GPU then
        Job(make("pp2-sm80", "pp2", "sm80"), against="stock-graphs", check=exchanges_in_order),
        Job(make("pp2-graphs", staged, "sm80"), against="stock-graphs", check=exchanges_in_order),
        # their runner hands later stages no token ids, which the experts of a model with vision are chosen by
        *(
            Job(make(f"pp2-{version}", "pp2", "sm80"), version, refused="MoE routing requires input_ids")
            for version in OLDER
        ),
    ]


def ending(job: Job, failed: str) -> list[str]:
    """What is wrong with how a run ended: it failed with the sentence `failed`, or completed where that is empty."""
    if job.refused and job.refused in failed:
        return []
    unrefused = [f"vLLM was to refuse it with {job.refused!r}"] if job.refused else []
    return [failed, *unrefused] if failed else unrefused


def _held_back(phase: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The same phase, not before both engines have started; timing not before all else is done, and in turns."""
    if phase["do"] == "time":
        # whole chunks, so large that the GPU and not the host is what takes the time
        more = {"prefill": 32_768, "repeats": 5, "kernels": True}
        return {**phase, **more, "after": str(options.work / QUIET), "lock": str(options.work / "turn")}
    return {**phase, "after": str(options.work / STARTED)}


def _fault_prompts(name: str) -> dict[str, Any]:
    phase = {"name": name, "do": "generate", "lengths": FAULT_LENGTHS, "tokens": 16}
    return phase if name == "prompts" else {**phase, "plant": name}


def nothing_bound(document: dict[str, Any]) -> str:
    """What is of ours in a process that must not use it; empty if nothing is."""
    allowed = {
        f"vllm.deepinfer_sm80{part}" for part in ("", ".gate", ".journal", ".bindings", ".bindings.spec")
    }
    for worker in (document["answer"] or {}).get("workers", []):
        if not worker["report"]:
            return "the overlay is not in this vLLM"
        if worker["report"]["bound"] or worker["held"]:
            return f"bound: {worker['report']['bound'] or worker['held']}"
        extra = [
            name for name in worker["payload_modules"] if name not in allowed and ".bindings." not in name
        ]
        if extra:
            return f"imported: {', '.join(extra)}"
    return ""


def exchanges_in_order(document: dict[str, Any]) -> str:
    """Whether a stage exchanges tokens by a stream that its model does not run on; empty if none does."""
    workers = (document["answer"] or {}).get("workers", [])
    # an archive from before it was asked does not say
    wrong = [str(rank) for rank, worker in enumerate(workers) if not worker.get("one_stream", True)]
    return (
        f"tokens are exchanged by another stream than the model's: stage {', '.join(wrong)}" if wrong else ""
    )


def _memory_bytes() -> int:
    code = "import torch; print(torch.cuda.mem_get_info()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 24 * 10**9


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

    def summary(self) -> dict[str, Any]:
        """What must hold, run by run; `ok` if all does."""
        runs = {job.run.name: self._verdict(job) for job in self.jobs}
        result: dict[str, Any] = {
            "schema_version": 1,
            "environment": _environment(self.documents),
            "runs": runs,
        }
        result["accelerate_against_enable"] = _gain(self.documents)
        result["ok"] = all(verdict["ok"] for verdict in runs.values())
        result["ok"] &= result["accelerate_against_enable"].get("ok", True)
        return result

    def _verdict(self, job: Job) -> dict[str, Any]:
        document = self.documents.get(job.run.name)
        if document is None:
            return {"ok": False, "reason": "no result"}
        findings, reasons = compare.of_run(document), []
        if job.run.plugin is not None or job.refused:
            findings = []
        other = self.documents.get(job.against or "")
        faults = {}
        if job.against and other is None:
            reasons.append(f"{job.against} has no result")
        elif other is not None and job.run.plugin is not None:
            faults = _faults(document, other)
            reasons += [f"{name} was not found" for name, fault in faults.items() if not fault["found"]]
        elif other is not None:
            findings += compare.against(document, other)
        reasons += [finding.reason for finding in findings if not finding.ok][:8]
        if problem := job.check(document):
            reasons.append(problem)
        failed = "" if document["complete"] else drive.why_failed(document)
        reasons = ending(job, failed) + reasons
        return {
            "ok": not reasons,
            "reasons": reasons,
            "version": document["version"],
            "what": job.run.configuration.what,
            "arch": document["arch"],
            "off": document["off"],
            "against": job.against,
            "refused": failed if job.refused else "",
            "seconds": document["seconds"],
            "kv_blocks": (document["answer"] or {}).get("kv_blocks"),
            "kv_tokens": document["kv_tokens"],
            "peak_bytes": {name: phase["peak_bytes"] for name, phase in document["phases"].items()},
            "took_s": {name: phase["took_s"] for name, phase in document["phases"].items()},
            "kernels": len(
                {(kernel["module"], kernel["name"]) for kernel in document["kernels"] if "name" in kernel}
            ),
            "kernel_problems": [kernel["problem"] for kernel in document["kernels"] if "problem" in kernel][
                :3
            ],
            "bound": sorted({one["op"] for one in _report(document).get("bound", [])}),
            "classes": _classes(document),
            "notable": document["notable"],
            "findings": [_short(finding) for finding in findings],
            **({"faults": faults} if faults else {}),
            **({"times": document["phases"]["times"]} if "times" in document["phases"] else {}),
        }

    def write_summary(self) -> dict[str, Any]:
        """summary.json, as far as it is; the same as the result."""
        self.options.output.mkdir(parents=True, exist_ok=True)
        summary = self.summary()
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


def _environment(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The GPU and what else the engines ran with."""
    for document in documents.values():
        if document["answer"]:
            answer = document["answer"]
            versions = {name: value for name, value in answer["versions"].items() if name != "vllm"}
            return {"gpu": answer["workers"][0]["gpu"], "python": answer["python"], **versions}
    return {}


def _report(document: dict[str, Any]) -> dict[str, Any]:
    workers = (document["answer"] or {}).get("workers") or [{}]
    return workers[0].get("report") or {}


def _classes(document: dict[str, Any]) -> list[str]:
    workers = (document["answer"] or {}).get("workers") or [{}]
    return list(workers[0].get("classes", []))


def _short(finding: compare.Finding) -> list[Any]:
    """kind, phase, length, mean, rms, p99, largest, ok."""
    numbers = (finding.mean, finding.rms, finding.p99, finding.largest)
    rounded = [None if value is None else round(value, 5) for value in numbers]
    return [finding.kind, finding.phase, finding.length, *rounded, finding.ok]


def _faults(document: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Each planted fault, whether the comparison with stock found it, and by what; `prompts` is the run without any."""
    result = {}
    expected = stock["phases"].get("prompts", {}).get("rows", [])
    for name, phase in document["phases"].items():
        findings = compare.same_lengths("against", name, expected, phase["rows"])
        bad = [finding for finding in findings if not finding.ok]
        found = bool(bad) if name != "prompts" else bool(findings) and not bad
        result[name] = {
            "found": found,
            "by": [f.reason for f in bad][:4],
            "findings": [_short(f) for f in findings],
        }
    return result


def _gain(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Step times and KV blocks of both timed runs."""
    both = [documents.get(name) for name in ("timed-accelerate", "timed-enable")]
    if not all(document and document["answer"] for document in both):
        return {}
    fast, slow = (document or {} for document in both)
    result: dict[str, Any] = {
        "kv_blocks": [document["answer"]["kv_blocks"] for document in (fast, slow)],
        "kv_tokens": [document["kv_tokens"] for document in (fast, slow)],
    }
    times = [document["phases"].get("times", {}) for document in (fast, slow)]
    for name in sorted(times[0].keys() & times[1].keys()):
        if name.endswith("_ms"):
            first, second = (time_[name]["median"] for time_ in times)
            result[name] = {"accelerate": first, "enable": second, "ratio": round(second / first, 3)}
    blocks = result["kv_blocks"]
    result["ok"] = bool(all(blocks) and blocks[0] >= blocks[1])
    return result


if __name__ == "__main__":
    sys.exit(main())
