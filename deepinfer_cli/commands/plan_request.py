"""What `deepinfer plan` was asked: the machine, the release and the load, and what of them no machine can do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_cli.commands import doctor_serve
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect import host
from deepinfer_cli.detect.gpu import detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError, UnsupportedError, UsageError
from deepinfer_cli.planner import buffers
from deepinfer_cli.serve import layout, memory
from deepinfer_cli.serve.memory import Load

# GiB of the largest card that may be meant, and tokens of the longest draft
MOST_MEMORY, MOST_DRAFTED = 1_024, 64
RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `plan` was asked.

    Attributes:
        where: which vLLM decides the release, and checks the plan.
        gpus, memory: GPUs and GiB of each; None: this machine's.
        host: GiB of the host; None: this machine's, where its GPUs are planned for.
        release: vLLM's version; None: the target's.
        load: context length (None in `context`: the longest that fits), concurrency and the other settings.
        layout, partition: one layout to explain.
        expert_parallel: whole experts, slices, or both.
        chart: file to draw to.
        check: hold the pool against the target's own planner.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    gpus: int | None = None
    memory: float | None = None
    host: float | None = None
    release: str | None = None
    context: int | None = None
    load: Load = field(default_factory=Load)
    layout: str | None = None
    partition: str | None = None
    expert_parallel: bool | None = None
    chart: Path | None = None
    check: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, GiB of each as nvidia-smi shows them, GiB of the host (None where it is not known), and whether they are this machine's."""

    gpus: int
    gib: float
    host: float | None
    here: bool


def target_of(opts: PlanOptions) -> Target | None:
    """The vLLM that is there; None where there is none, unless one was named."""
    from deepinfer_cli.detect.vllm import find_target

    try:
        return find_target(target=opts.where.target, python=opts.where.python)
    except DeepInferError:
        if opts.where.target or opts.where.python:
            raise
        return None


def load_of(opts: PlanOptions, target: Target | None) -> Load:
    """What is served, for the release that is asked for, or the target's.

    Raises:
        UsageError: vLLM would refuse it on any machine, or the model has no such context.
    """
    release = opts.release or (target.version if target else None) or Load().release
    if release not in RELEASES and opts.release is not None:
        near = min(RELEASES, key=lambda one: abs(buffers.minor(one) - buffers.minor(release)))
        raise UsageError(
            f"--vllm {release}: no release that is known",
            code="usage",
            hint=f"{', '.join(RELEASES)}; --vllm {near}",
        )
    named = opts.where.target or opts.where.python
    if target and target.version and named and target.version.partition("+")[0] != release:
        raise UsageError(
            f"--vllm {release}, and the vLLM in {target.root} is {target.version}",
            code="usage",
            hint="one of the two: leave --vllm out, or --target and --python",
        )
    load = replace(opts.load, release=release)
    _check_sizes(opts.memory, load)
    layout.check_context(opts.context)
    if load.utilization > 1:
        raise UsageError(
            f"--gpu-memory-utilization {load.utilization:g}: more than the whole card",
            code="usage",
            hint="0.92",
        )
    if load.batched_tokens < load.sequences:
        raise UsageError(
            f"--max-num-batched-tokens {load.batched_tokens} is less than --max-num-seqs {load.sequences}: vLLM refuses it",
            code="usage",
            hint=f"--max-num-seqs {load.batched_tokens}",
        )
    if load.block_size % 32:
        raise UsageError(
            f"--block-size {load.block_size}: no multiple of the window's 32 tokens",
            code="usage",
            hint="--block-size 128",
        )
    return load


def _check_sizes(gib: float | None, load: Load) -> None:
    """Refuses what was meant in another unit, or by nobody."""
    if gib is not None and gib > MOST_MEMORY:
        mib = gib / 1_024
        raise UsageError(
            f"--gpu-memory {gib:g}: no card has that many GiB",
            code="usage",
            hint=f"in GiB: {mib:g}?" if 4 <= mib <= MOST_MEMORY else "in GiB, such as --gpu-memory 80",
        )
    if load.speculative > MOST_DRAFTED:
        raise UsageError(
            f"--speculative-tokens {load.speculative}: more than {MOST_DRAFTED}",
            code="usage",
            hint=f"--speculative-tokens {memory.DRAFT_TOKENS}",
        )
    if load.concurrency > load.sequences:
        raise UsageError(
            f"--concurrency {load.concurrency:g} is more than --max-num-seqs {load.sequences}: no more run at once",
            code="usage",
            hint=f"--concurrency {load.sequences}, or a larger --max-num-seqs",
        )


def machine_of(opts: PlanOptions, needed: int | None) -> Machine:
    """The GPUs to plan for: as given; else what is here.

    Args:
        needed: GPUs of the layout that is explained, which is what there is where only their memory is given.

    Raises:
        UnsupportedError: nothing is given, and no SM8x card is here.
        UsageError: the layout takes more GPUs than there are.
    """
    gpus, gib = opts.gpus or (needed if opts.memory else None), opts.memory
    here = gpus is None or gib is None
    if here:
        cards = doctor_serve.usable(detect_gpus())
        sizes = [card.memory_bytes for card in cards if card.memory_bytes]
        if not sizes:
            raise UnsupportedError(
                "there is no SM8x card here whose memory can be read",
                code="gpu-not-found",
                hint="say what to plan for, such as --gpus 8 --gpu-memory 80",
            )
        gpus, gib = gpus or len(cards), gib or min(sizes) / memory.GIB
    assert gpus is not None and gib is not None
    if needed is not None and needed > gpus:
        raise UsageError(
            f"--layout {opts.layout} takes {needed} GPUs, and there are {gpus}",
            code="layout-impossible",
            hint=f"--gpus {needed}, or leave --layout out to see what {gpus} can do",
        )
    total = host.memory_bytes() if here and opts.host is None else None
    return Machine(gpus, gib, opts.host or (total / memory.GIB if total else None), here)
