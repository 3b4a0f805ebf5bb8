"""Holds the planner's KV pool against what vLLM reports, on a GPU: small models in many configurations.

    python scripts/gpu_plan_check.py --site 0.33.0=/tmp/site_0.33.0 [--site 0.30.0=...] --output plan_check.json
        [--gpus N] [--at-once N] [--only NAME,NAME] [--timeout SECONDS] [--work DIR] [--overlay-site FOLDER] [--list]

A site is a folder that holds `vllm` and what it needs. Each engine is a child of this interpreter that is given its KV
cache in bytes and stops before its first forward pass: several share a card. Rows that say `profile` also run vLLM's
dummy pass, and report weights by part and the peak of activations; `measure` lets vLLM find the bytes itself, alone, last.
Rows named `-sm80` tell vLLM that the card has capability (8, 0); those that run a pass need `--overlay-site`, a copy of
a site with the overlay. The JSON file is written after every row; the exit code is 0 if every row agrees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from deepinfer_cli.planner import kv, shape  # noqa: E402
from deepinfer_cli.validate.e2e import child, model, plan  # noqa: E402

MAIN = "0.33.0"
GIB = 1 << 30
TOLERANCE, TWO_GPUS = 0.01, 0.02
_EVENT = "plan-check: "


@dataclass(frozen=True)
class Row:
    """One engine.

    Attributes:
        text: changes to the small model's text config.
        engine: keyword arguments of vLLM's `LLM`, over `ENGINE`.
        gib: KV cache that each stage is given.
        do: `pool` (no forward pass), `profile` (vLLM's dummy pass) or `measure` (vLLM finds the bytes).
        capability: what vLLM is told of the card.
        partition: layers of each stage.
        overlay: it runs a pass on (8, 0).
        fails: vLLM is known to refuse it, with these words.
    """

    name: str
    text: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    gib: tuple[float, ...] = (4.0,)
    do: str = "pool"
    capability: tuple[int, int] | None = None
    partition: tuple[int, ...] = ()
    overlay: bool = False
    options: model.ModelOptions = field(default_factory=lambda: model.ModelOptions(engram=False))
    version: str = MAIN
    fails: str = ""

    @property
    def gpus(self) -> int:
        """GPUs that it takes."""
        return int(self.engine.get("tensor_parallel_size", 1) * self.engine.get("pipeline_parallel_size", 1))

    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        whole = model.config(self.options)
        whole["text_config"].update(self.text)
        return whole

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`."""
        return {**ENGINE, **self.engine}

    def traffic(self) -> kv.Traffic:
        """What the planner is asked."""
        given = self.settings()
        drafted = given.get("speculative_config", {}).get("num_speculative_tokens", 0)
        return kv.Traffic(
            given["max_model_len"],
            given["max_num_batched_tokens"],
            given["block_size"],
            drafted,
            given.get("async_scheduling", True),
        )


ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True, "seed": 0, "max_model_len": 8_192,
    "max_num_batched_tokens": 2_048, "max_num_seqs": 16, "block_size": 64, "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 0}, "gpu_memory_utilization": 0.12,
}  # fmt: skip
AMPERE = (8, 0)
LONG = model.ModelOptions(engram=False, positions=1_048_576)
# two sources of ratio 2 and one of ratio 1: page sizes in unequal numbers, as the real model's
UNEVEN = {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1], "kv_source_layer_ids": [2, 4, 6],
          "index_source_layer_ids": [2, 4, 6], "candidate_source_layer_id": 6}  # fmt: skip
DEEPER = {"num_hidden_layers": 12, "compress_ratios": [0, 0, *[2] * 4, *[1] * 6], "kv_source_layer_ids": [2, 6],
          "index_source_layer_ids": [2, 6, 8, 10], "candidate_source_layer_id": 6}  # fmt: skip
FLASH = {"num_hidden_layers": 40, "compress_ratios": list(shape.FLASH.ratios), "n_routed_experts": 8,
         "kv_source_layer_ids": list(shape.FLASH.kv_sources), "candidate_source_layer_id": 20,
         "index_source_layer_ids": list(shape.FLASH.index_sources)}  # fmt: skip
DRAFTED = {**FLASH, "num_nextn_predict_layers": 3, "dspark_target_layer_ids": [18, 28, 38]}
DSPARK = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
MILLION = {"max_model_len": 1_048_576, "max_num_batched_tokens": 8_192, "gpu_memory_utilization": 0.2}
PP = {"pipeline_parallel_size": 2, "block_size": 128}
# stock starts no pipeline of V4.1
PIPELINE: dict[str, Any] = {"capability": AMPERE, "overlay": True}
ROWS: tuple[Row, ...] = (
    Row("published-pool", gib=(525_518 * 69_696 / GIB,), engine={"enable_prefix_caching": False, "max_num_seqs": 8}),
    Row("prefix-caching"),
    Row("no-prefix-caching", engine={"enable_prefix_caching": False}),
    Row("context-65536", engine={"max_model_len": 65_536}),
    Row("context-262144", options=LONG, engine={"max_model_len": 262_144}),
    Row("batched-512", engine={"max_num_batched_tokens": 512}),
    Row("batched-8192", engine={"max_num_batched_tokens": 8_192}),
    Row("sequences-128", engine={"max_num_seqs": 128}),
    Row("layers-12", text=DEEPER),
    Row("layers-uneven", text=UNEVEN),
    Row("sync-scheduling", engine={"async_scheduling": False}),
    Row("dspark", options=replace(LONG, draft=True), engine=DSPARK),
    Row("block-128-sm80", engine={"block_size": 128}, capability=AMPERE),
    Row("block-256-sm80", engine={"block_size": 256}, capability=AMPERE, fails="needs 128-token kernel blocks"),
    Row("depth-40-sm80", FLASH, {**MILLION, "block_size": 128}, capability=AMPERE, options=LONG),
    Row("depth-40-dspark-sm80", DRAFTED, {**MILLION, **DSPARK, "block_size": 128}, capability=AMPERE,
        options=replace(LONG, draft=True)),
    Row("tp2", engine={"tensor_parallel_size": 2}),
    Row("pp2", engine=PP, partition=(4, 4), gib=(4.0, 5.0), **PIPELINE),
    Row("pp2-uneven", UNEVEN, PP, partition=(6, 2), gib=(5.0, 4.0), **PIPELINE),
    Row("pp2-depth-40", FLASH, {**MILLION, **PP}, partition=(20, 20), gib=(6.0, 6.0), options=LONG, **PIPELINE),
    # a stage that owns no layer of a KV cache group: stock's allocation finds no group for the layers that it was left
    Row("pp2-stock", engine={"pipeline_parallel_size": 2}, partition=(4, 4), fails="Worker failed"),
    Row("tp2-profile", do="profile", engine={"tensor_parallel_size": 2, "max_num_batched_tokens": 8_192}),
    Row("profile", do="profile"),
    Row("profile-262144", options=LONG, do="profile", gib=(6.0,),
        engine={"max_model_len": 262_144, "max_num_batched_tokens": 8_192, "gpu_memory_utilization": 0.2}),
    Row("profile-sm80", do="profile", engine={"block_size": 128}, capability=AMPERE, overlay=True),
    Row("profile-262144-sm80", options=LONG, do="profile", gib=(6.0,), capability=AMPERE, overlay=True,
        engine={"block_size": 128, "max_model_len": 262_144, "max_num_batched_tokens": 8_192,
                "gpu_memory_utilization": 0.2}),
    Row("measure", do="measure", engine={"gpu_memory_utilization": 0.3}),
)  # fmt: skip
OLDER = ("published-pool", "layers-uneven", "block-128-sm80", "dspark")


def main() -> int:
    """Run the rows and write what they showed."""
    options = _options()
    sites = {
        version: Path(folder).resolve() for version, folder in (text.split("=", 1) for text in options.site)
    }
    rows = [row for row in _rows(sites, options) if _chosen(row, options)]
    if options.list or not rows:
        print("\n".join(f"{row.name:24} {row.version}  {row.do}, {row.gpus} GPU" for row in rows))
        return 0 if options.list else 2
    check = Check(options, sites, rows)
    check.run()
    return 0 if all(row["ok"] for row in check.found.values()) and len(check.found) == len(rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", action="append", default=[], metavar="VERSION=FOLDER")
    parser.add_argument("--overlay-site", type=Path)
    parser.add_argument("--output", type=Path, default=Path("plan_check.json"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/deepinfer-plan-check"))
    parser.add_argument("--only", default="", help="names or beginnings of names, separated by commas")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that an engine may take")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def _rows(sites: Mapping[str, Path], options: argparse.Namespace) -> list[Row]:
    """All rows of the newest release, and a few of the older ones; two GPUs first: they take longest."""
    known = {row.name: row for row in ROWS}
    found = [row for row in ROWS if not row.overlay or options.overlay_site]
    for version in sites:
        if version != MAIN:
            found += [replace(known[name], name=f"{name}-{version}", version=version) for name in OLDER]
    found = [row for row in found if row.version in sites or options.list]
    return sorted(found, key=lambda row: (row.do == "measure", -row.gpus, row.do == "pool"))


def _chosen(row: Row, options: argparse.Namespace) -> bool:
    names = tuple(name for name in options.only.split(",") if name)
    return row.gpus <= options.gpus and (not names or row.name.startswith(names))


class Check:
    """The rows under way and what they showed."""

    def __init__(self, options: argparse.Namespace, sites: Mapping[str, Path], rows: Sequence[Row]) -> None:
        self.options, self.sites, self.rows = options, sites, rows
        self.found: dict[str, dict[str, Any]] = {}
        self.environment: dict[str, Any] = {}
        self.began = time.monotonic()
        self.lock = threading.Lock()

    def run(self) -> None:
        """Runs all rows, several at once; those that measure a card come last and alone."""
        waiting: queue.Queue[Row] = queue.Queue()
        for row in self.rows:
            if row.do != "measure":
                waiting.put(row)
        threads = [
            threading.Thread(target=self._work, args=(waiting, index % self.options.gpus))
            for index in range(self.options.at_once)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for row in self.rows:
            if row.do == "measure":
                self._run(row, 0)

    def _work(self, waiting: queue.Queue[Row], card: int) -> None:
        while True:
            try:
                row = waiting.get_nowait()
            except queue.Empty:
                return
            self._run(row, card)

    def _run(self, row: Row, card: int) -> None:
        began = time.monotonic()
        events = self._child(row, card)
        result = compare(row, events) | {"seconds": round(time.monotonic() - began, 1)}
        with self.lock:
            self.environment |= next((one["environment"] for one in events if "environment" in one), {})
            self.found[row.name] = result
            self._write()
        verdict = "agrees" if result["ok"] else f"DIFFERS: {result['problem']}"
        print(f"[{time.monotonic() - self.began:6.1f}] {row.name}: {verdict}", flush=True)

    def _child(self, row: Row, card: int) -> list[dict[str, Any]]:
        folder = self.options.work / row.name
        folder.mkdir(parents=True, exist_ok=True)
        site = self.options.overlay_site.resolve() if row.overlay else self.sites[row.version]
        request = folder / "request.json"
        request.write_text(json.dumps(request_of(row, folder, site)), encoding="utf-8")
        log = folder / "child.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--child", str(request)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, cwd=folder, text=True,
                env=environment(row, site, card), start_new_session=True,
            )  # fmt: skip
            try:
                text, _ = process.communicate(timeout=self.options.timeout)
            except subprocess.TimeoutExpired:
                text = ""
            finally:
                _end(process)
        events = [json.loads(line[len(_EVENT) :]) for line in text.splitlines() if line.startswith(_EVENT)]
        if not any("vllm" in event for event in events) and not row.fails:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
            print("\n".join(f"    | {line[:220]}" for line in tail), flush=True)
            events.append({"log": tail})
        return events

    def _write(self) -> None:
        rows = [self.found[row.name] for row in self.rows if row.name in self.found]
        content = {"schema_version": 1, "environment": self.environment, "rows": rows}
        self.options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.wait()


def environment(row: Row, site: Path, card: int) -> dict[str, str]:
    """The child's variables."""
    env = dict(plan.CONFIGURATIONS["tp2"].env) if row.gpus > 1 else {"CUDA_VISIBLE_DEVICES": str(card)}
    if row.partition:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, row.partition))
    run = plan.Run(
        row.name,
        plan.Configuration(row.name, env=env),
        parent=site,
        arch="sm80" if row.overlay else None,
        generate=row.overlay,
        bytecode=True,
    )
    found = run.environment() | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if row.capability:
        found["TRITON_OVERRIDE_ARCH"] = f"sm{row.capability[0]}{row.capability[1]}"
    return found


def request_of(row: Row, folder: Path, site: Path) -> dict[str, Any]:
    """What the child is told."""
    return {
        "parent": str(site), "out": str(folder), "model_dir": str(folder / "model"), "config": row.config(),
        "engine": row.settings(), "capability": list(row.capability) if row.capability else None,
        "available": [int(gib * GIB) for gib in row.gib], "do": row.do,
        "tp": row.engine.get("tensor_parallel_size", 1),
    }  # fmt: skip


def compare(row: Row, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the file: vLLM's figures, the planner's from the same bytes, and how far they are apart."""
    merged: dict[str, Any] = {}
    for event in events:
        merged |= event
    workers = [event["worker"] for event in events if "worker" in event]
    row_data: dict[str, Any] = {
        "name": row.name, "release": row.version, "do": row.do, "gpus": row.gpus, "engine": row.settings(),
        "partition": list(row.partition), "capability": row.capability, "changed": dict(row.text),
        "workers": workers, "vllm": merged.get("vllm"), "planner": None, "ok": False, "problem": "",
    }  # fmt: skip
    if row.fails:
        row_data["refused"] = str(merged.get("error", ""))
        row_data["ok"] = row.fails in row_data["refused"]
        row_data["problem"] = "" if row_data["ok"] else f"vLLM does not say {row.fails!r}"
        return row_data
    if "vllm" not in merged:
        last = merged.get("log", ["no answer"])[-1:]
        row_data["problem"] = merged.get("error") or "".join(last)
        row_data["log"] = merged.get("log", [])
        return row_data
    small = shape.from_config(row.config())
    partition = row.partition or (small.layers,)
    available = [
        min(one["available"] for one in workers if one["stage"] == stage) for stage in range(len(partition))
    ]
    pool = kv.pool(small, partition, row.traffic(), available)
    row_data["planner"] = {
        "available": available,
        "blocks": pool.blocks,
        "tokens": pool.tokens,
        "concurrency": pool.concurrency,
    }
    apart = abs(pool.tokens / merged["vllm"]["tokens"] - 1)
    row_data["difference"] = apart
    row_data["ok"] = apart <= (TWO_GPUS if row.gpus > 1 else TOLERANCE)
    if not row_data["ok"]:
        row_data["problem"] = f"{pool.tokens:,} planned, vLLM says {merged['vllm']['tokens']:,}"
    return row_data


# what follows runs in the child and in the workers that it spawns


def serve(path: str) -> None:
    """Starts the engine of a request and says what it has; the process ends here."""
    emit = _channel()
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        prepare(request)
        folder = Path(request["model_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(request["config"]), encoding="utf-8")
        from vllm import LLM

        engine = LLM(model=str(folder), **request["engine"])
        cache = engine.llm_engine.vllm_config.cache_config
        for file in sorted(Path(request["out"]).glob("worker-*.json")):
            emit({"worker": json.loads(file.read_text(encoding="utf-8"))})
        emit({"environment": _environment()})
        emit({"vllm": {"blocks": cache.num_gpu_blocks, "tokens": cache.kv_cache_size_tokens,
                       "concurrency": cache.kv_cache_max_concurrency}})  # fmt: skip
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        told = child.describe(error)
        emit({"error": f"{told['kind']}: {told['message'][:600]} ({told['place']})"})
    sys.stderr.flush()
    os._exit(0)


def prepare(request: dict[str, Any]) -> None:
    """In each process, before vLLM decides anything: the capability, the bytes for the KV cache, no warm-up."""
    child.prepare(request)
    from vllm.v1.worker import gpu_worker

    gpu_worker.Worker.determine_available_memory = _determine(
        gpu_worker.Worker.determine_available_memory, request
    )
    times = getattr(gpu_worker, "CompilationTimes", None)
    gpu_worker.Worker.compile_or_warm_up_model = lambda self: times(0.0, 0.0) if times else 0.0


def _determine(original: Any, request: dict[str, Any]) -> Any:
    def determine_available_memory(self: Any) -> int:
        import torch

        stage = self.rank // request["tp"]
        given = request["available"][min(stage, len(request["available"]) - 1)]
        facts = {"rank": self.rank, "stage": stage, **weights(self)}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if request["do"] == "profile":
            self.cache_config.kv_cache_memory_bytes = given
        available = given if request["do"] == "pool" else int(original(self))
        if request["do"] != "pool":
            facts |= {
                "peak_over_weights": torch.cuda.max_memory_allocated() - before,
                "kept_over_weights": torch.cuda.memory_allocated() - before,
                "reserved": torch.cuda.memory_reserved(),
            }
        for name in (
            "requested_memory",
            "total_consumed",
            "peak_activation_memory",
            "cudagraph_memory_estimate",
        ):
            if isinstance(value := getattr(self, name, None), int):
                facts[name] = value
        facts["available"] = int(available)
        Path(request["out"], f"worker-{self.rank}.json").write_text(json.dumps(facts), encoding="utf-8")
        return int(available)

    return determine_available_memory


PARTS = (("vision", "vision"), ("dspark", "draft"), ("engram", "engram"), ("shared experts", "shared_expert"),
         ("experts", "experts"), ("router", ".gate"), ("indexer", "indexer"), ("compressor", "compressor"),
         ("rope", "rotary"), ("attention", "attn"), ("embedding", "embed_tokens"), ("head", "lm_head"))  # fmt: skip


def weights(worker: Any) -> dict[str, Any]:
    """Bytes of a worker's loaded model: as vLLM counts them, as PyTorch has them, and by part from the tensors' names."""
    import torch

    runner = worker.model_runner
    parts: dict[str, int] = {}
    seen: set[int] = set()
    models = {"": runner.get_model(), "draft.": getattr(getattr(runner, "speculator", None), "model", None)}
    for prefix, found in models.items():
        for name, tensor in _tensors(found) if found is not None else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or tensor.device.type != "cuda":
                continue
            seen.add(storage.data_ptr())
            part = next((part for part, mark in PARTS if mark in prefix + name), "other")
            parts[part] = parts.get(part, 0) + storage.nbytes()
    return {
        "parts": parts,
        "model_memory_usage": int(getattr(runner, "model_memory_usage", 0)),
        "allocated": torch.cuda.memory_allocated(),
    }


def _tensors(found: Any) -> Any:
    import torch

    for path, module in found.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _environment() -> dict[str, Any]:
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(), "count": torch.cuda.device_count(),
        "memory_bytes": torch.cuda.mem_get_info()[1], "torch": torch.__version__, "cuda": torch.version.cuda,
        "vllm": vllm.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _channel() -> Any:
    """A private copy of stdout; whoever prints to stdout from now on prints to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        stream.write(_EVENT + json.dumps(event, default=str) + "\n")
        stream.flush()

    return emit


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2])
    raise SystemExit(main())
if __name__ == "__mp_main__" and sys.argv[1:2] == ["--child"]:
    prepare(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
