"""`model_executor/kernels/mhc/warmup.py`: what is compiled for mHC before vLLM serves.

In all four releases each decoder layer registers keys of `MHC_PRE_NORM_KERNEL` while the model is built, and
`kernel_warmup` in the worker hands them to `compile_many`, after the profile run and before CUDA graphs are captured
(not with `enable_jit_warmup` off). Stock's kernel that they are for runs in none of our functions, so ours are compiled
in its place, and every other bound op's with them; keys of other shapes, and all of them where one of the two ops is
left to stock, go on to stock. So it is replaced wherever any op is, with all mHC switched off too.
"""

from __future__ import annotations

from typing import Any

from .mhc_tilelang import HC_MULT, HIDDEN_SIZES
from .spec import Binding

MODULE = "model_executor.kernels.mhc.warmup"
# the ops whose stock functions run that kernel
USERS = frozenset({"mhc_pre_delayed", "mhc_fused_post_pre_delayed"})


def _compile_many(stock):
    def compile_many(self, compile_keys):
        from .. import bound_ops, warm

        keys = list(compile_keys)
        ours = [key for key in keys if _is_ours(key)]
        for hidden in sorted({key.hidden_size for key in ours}):
            warm.up(hidden)
        warm.up()
        replaced = ours if bound_ops() >= USERS else []
        return stock(self, [key for key in keys if key not in replaced])

    return compile_many


def _is_ours(key: Any) -> bool:
    """Whether our functions serve what the key is for; a split epilogue belongs to newer cards (0.31 and later)."""
    fused = getattr(key, "split_mode", "fused") == "fused"
    return key.hidden_size in HIDDEN_SIZES and key.hc_mult == HC_MULT and key.save_pre_mix and fused


BINDINGS = (Binding("MHCPreNormKernel.compile_many", "mhc_pre_delayed", (_compile_many,), serves_all=True),)
