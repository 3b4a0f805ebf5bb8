"""What `gpu_e2e.py` runs: its jobs, what each is held against, and what must be true of it besides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.e2e import plan

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


def make_jobs(work: Path, groups: dict[str, str]) -> list[Job]:
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
        phases=tuple(_held_back(phase, work) for phase in known["graphs"].phases),
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
    bare = replace(
        staged,
        what="two GPUs, pipeline of two and six layers, CUDA graphs",
        env={**staged.env, "VLLM_PP_LAYER_PARTITION": "2,6"},
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
        # a first stage of windows alone knows other cache layouts than the next one
        Job(make("pp2-two-layers", bare, "sm80"), refused="Workers disagree on supported KV cache layouts"),
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


def _held_back(phase: Any, work: Path) -> dict[str, Any]:
    """The same phase, not before both engines have started; timing not before all else is done, and in turns."""
    if phase["do"] == "time":
        # whole chunks, so large that the GPU and not the host is what takes the time
        more = {"prefill": 32_768, "repeats": 5, "kernels": True}
        return {**phase, **more, "after": str(work / QUIET), "lock": str(work / "turn")}
    return {**phase, "after": str(work / STARTED)}


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
