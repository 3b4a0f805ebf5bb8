"""Which attention class a layer gets on SM8x, and what is refused there."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..bindings.spec import BindError

ROCM_CLASS = "DeepseekV41ROCMAiterMLAAttention"
PLATFORM = "vllm.platforms.rocm"
# what `--attention-backend` may name: the class that is served anyway
SERVED_BACKENDS = frozenset({"ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41"})

_classes: dict[tuple[str, bool], type] = {}
_log = logging.getLogger(__name__)


def select(stock: Callable[[Any], type], vllm_config: Any) -> type:
    """The attention class of V4.1's layers on SM8x, made on the first call.

    Args:
        stock: vLLM's own choice; its module says which of V4.1's packages this is.
        vllm_config: vLLM's configuration of the model that is being built.

    Raises:
        ValueError: the configuration asks for what has no kernels on SM8x.
        BindError: the class in this vLLM is not one of those we know, or this process has no CUDA device yet.
    """
    from .. import serves

    refuse(vllm_config)
    package = stock.__module__.rpartition(".nvidia.")[0]
    shared = serves("yoco")
    made = _classes.get((package, shared))
    if made is None:
        from .layer import make

        rocm = import_rocm(f"{package}.amd.rocm")
        made = _classes[package, shared] = make(rocm, _stock_class(rocm), shared=shared)
        _log.info("DeepInfer: V4.1's attention layers are vLLM's portable Triton class, as CUDA layers")
    return made


def refuse(vllm_config: Any) -> None:
    """Stop what stock would give to FlashMLA or FlashInfer, neither of which has kernels for SM8x.

    Raises:
        ValueError: prefill context parallelism, or a backend by name other than the ROCm class's.
    """
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ValueError(
            "prefill context parallelism needs FlashMLA, which has no kernels for compute capability 8.x: "
            "leave --prefill-context-parallel-size at 1"
        )
    backend = vllm_config.attention_config.backend
    name = getattr(backend, "name", backend)
    if name is not None and name not in SERVED_BACKENDS:
        raise ValueError(
            f"attention backend {name} has no kernels for DeepSeek-V4.1 on compute capability 8.x: "
            "leave --attention-backend unset"
        )


def import_rocm(name: str) -> ModuleType:
    """The module of the portable class.

    Its import asks torch for the card's name (`gcnArchName`), which starts CUDA in a process that has not: vLLM builds
    layers in workers, which have, and nowhere else may it happen.

    Raises:
        BindError: CUDA has not been started here.
    """
    import torch

    if PLATFORM not in sys.modules and not torch.cuda.is_initialized():
        raise BindError(
            f"{name} cannot be imported here: it would start CUDA, and this process has not chosen its device"
        )
    with _without_warnings(PLATFORM):
        return importlib.import_module(name)


def _stock_class(rocm: ModuleType) -> type:
    found = vars(rocm).get(ROCM_CLASS)
    if not isinstance(found, type):
        raise BindError(f"{rocm.__name__} has no class {ROCM_CLASS}")
    return found


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """The ROCm platform warns that AMD's libraries are missing: true of every NVIDIA machine."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
