"""`v1/worker/gpu/pp_utils.py`: the stream by which pipeline stages exchange sampled tokens.

`PPHandler.__init__` (all four, one signature) notes PyTorch's current stream. On a stream of its own the last stage then
sends the tokens once the noted one has sampled them, and the others let the noted one wait for what they receive. vLLM moves
a worker to another stream at the first call of `current_stream` (`utils/torch_utils.py`), and nothing orders the new one
with PyTorch's default stream. Mostly that is earlier: `PyNcclCommunicator` calls it when it is made. Without it
(`VLLM_DISABLE_PYNCCL`, or an NCCL that lacks a function it asks for: no word in the log) the first call comes with the model's
first Marlin product, which is what SM8x has for FP4 and FP8 weights (from 0.31 on), or with a CUDA graph. The handler
then waits for a stream on which nothing runs: memory is sent that nothing has been written to yet, and read before anything
is received. It holds numbers of tokens, so positions and addresses are made of it.

Ours lets vLLM choose its stream first. Where it has, nothing changes.
"""

from __future__ import annotations

import importlib

from .spec import Binding

MODULE = "v1.worker.gpu.pp_utils"


def _init(stock):
    """All four."""

    def __init__(self, max_num_reqs, num_speculative_steps, device):
        root = stock.__globals__["__name__"].partition(".")[0]
        importlib.import_module(f"{root}.utils.torch_utils").current_stream()
        stock(self, max_num_reqs, num_speculative_steps, device)

    return __init__


BINDINGS = (Binding("PPHandler.__init__", "pipeline", (_init,)),)
