"""Times launches inside a worker: graph replays for small ones, events for calls that wait for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepinfer_cli.validate.tensors import clone_inputs, leaves

MAX_SETS = 1024
ROUNDS = 30
HOST_CALLS = 50
_COPY_BYTES = 1 << 30
_BUSY_BYTES = 1 << 30

Call = Callable[[dict[str, Any]], Any]


class Timer(Protocol):
    """Gives the latency of one call, in microseconds, averaged over one pass."""

    def sample(self) -> float:
        """One measurement."""


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80, rounded to a nanosecond."""
    ordered = sorted(samples)
    if len(ordered) == 1:
        ordered *= 2
    cuts = statistics.quantiles(ordered, n=10, method="inclusive")
    return {"p20": round(cuts[1], 3), "p50": round(cuts[4], 3), "p80": round(cuts[7], 3)}


def input_sets(inputs: dict[str, Any], touched_bytes: int) -> list[dict[str, Any]]:
    """`inputs` and enough copies of it that, taken in turn, none is still in L2 when its turn comes again."""
    import torch

    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    size = sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in leaves(inputs).values()
        }.values()
    )
    free, _total = torch.cuda.mem_get_info()
    wanted = 2 * l2_bytes // max(1, min(size, touched_bytes)) + 2
    fits = max(2, free // 2 // max(1, size))
    return [inputs, *(clone_inputs(inputs) for _ in range(min(wanted, fits, MAX_SETS) - 1))]


class GraphTimer:
    """Replays one graph that holds one launch per input set: no host time, no set still in L2."""

    def __init__(self, call: Call, sets: list[dict[str, Any]]) -> None:
        import torch

        self._count = len(sets)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs in sets[:3]:
                call(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for inputs in sets:
                call(inputs)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self.sample()

    def sample(self) -> float:
        """One replay, divided by its launches."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._count


class EventTimer:
    """Times one call between events while the stream is busy before it, as in a server.

    A long write is queued first: it clears L2, and the host runs ahead of the device meanwhile. A call that does not
    wait for the device is then timed without its host work; one that does wait cannot hide what it does afterwards.
    """

    def __init__(self, call: Call, sets: list[dict[str, Any]]) -> None:
        import torch

        self._call, self._sets, self._turn = call, sets, 0
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        free, _total = torch.cuda.mem_get_info()
        self._busy = torch.empty(min(_BUSY_BYTES, free // 8), dtype=torch.uint8, device="cuda")
        for _ in range(5):
            self.sample()

    def sample(self) -> float:
        """One call on the next input set."""
        import torch

        inputs = self._sets[self._turn % len(self._sets)]
        self._turn += 1
        torch.cuda.synchronize()
        self._busy.zero_()
        self._start.record()
        self._call(inputs)
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3


def alternate(timers: dict[Any, Timer], rounds: int = ROUNDS) -> dict[Any, dict[str, float]]:
    """Samples all timers in turn, the order reversed every other round; key → quantiles in microseconds."""
    samples: dict[Any, list[float]] = {key: [] for key in timers}
    for turn in range(rounds):
        for key in list(timers) if turn % 2 == 0 else list(reversed(timers)):
            samples[key].append(timers[key].sample())
    return {key: quantiles(values) for key, values in samples.items()}


def host_us(call: Call, sets: list[dict[str, Any]], calls: int = HOST_CALLS) -> float:
    """Median time that the host is busy with one call, which includes any waiting the call does itself."""
    import torch

    torch.cuda.synchronize()
    spent = []
    for turn in range(calls):
        began = time.perf_counter()
        call(sets[turn % len(sets)])
        spent.append((time.perf_counter() - began) * 1e6)
        if turn % 10 == 9:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return round(statistics.median(spent), 3)


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy far larger than L2, bytes read and written both counted."""
    import torch

    free, _total = torch.cuda.mem_get_info()
    size = min(_COPY_BYTES, free // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    timer = EventTimer(
        lambda tensors: tensors["copy"].copy_(tensors["source"]), [{"copy": copy, "source": source}]
    )
    microseconds = statistics.median([timer.sample() for _ in range(20)])
    return float(2 * size / (microseconds * 1e-6))
