"""Compiles the TileLang variants of the ops: for the card at hand, or without one for the compile gate."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gate
from .gate import DISABLE_OPS

if TYPE_CHECKING:
    from .ops.spec import TileVariant

# (variant, architecture) → its compiled kernel, and bytes of shared memory
_kernels: dict[tuple[str, str], tuple[Any, int]] = {}
# TileLang compiles in several threads at once, but the same variant need not be compiled twice
_locks: dict[tuple[str, str], threading.Lock] = {}
_registry = threading.Lock()
_tracing = threading.Lock()


class NoDeviceError(RuntimeError):
    """There is no card that the payload has kernels for, and none is forced."""


class CompileError(RuntimeError):
    """TileLang or the nvcc that it calls could not make a kernel; the message says what to look at."""


class SharedMemoryError(ValueError):
    """A kernel takes more shared memory than a CTA may have on this device."""


@dataclass(frozen=True)
class Lowered:
    """A variant as code for one architecture.

    Attributes:
        source: CUDA C++ of the kernel.
        ptx: what nvcc makes of it.
        threads: threads of one CTA.
        dynamic_shared: bytes of shared memory that the launch asks for, beside what the code declares.
    """

    source: str
    ptx: str
    threads: int
    dynamic_shared: int


def target(device: gate.Device | None = None) -> dict[str, Any]:
    """TileLang's target for `device`, by default for `gate.device()`.

    A forced device gets the code that TileLang generates for its architecture, compiled from that architecture's PTX
    for the card that is really there.

    Raises:
        NoDeviceError: no device is given and `gate.device()` is None.
    """
    device = device or gate.device()
    if device is None:
        raise NoDeviceError("no SM8x device; set DEEPINFER_FORCE_ARCH to run on another")
    description: dict[str, Any] = {"kind": "cuda", "arch": _sm(device.arch)}
    present = gate.capability()
    if device.forced and present is not None and present != device.capability:
        description["code"] = ["sm_{}{}".format(*present)]
    return description


def kernel(variant: TileVariant) -> Any:
    """The compiled kernel of `variant` for `gate.device()`: once per process, name and target.

    Raises:
        NoDeviceError: there is no device to compile for.
        ValueError: the variant may not be launched on this device, or takes more shared memory than a CTA has there.
        CompileError: it does not compile; `__cause__` has the compiler's own words in full.
    """
    device = gate.device()
    # the common case first, without a lock: this runs at every launch
    key = (variant.name, device.arch if device is not None else "")
    found = _kernels.get(key)
    if device is not None and found is not None:
        _check_fits(variant, found[1], device)
        return found[0]
    description = target(device)
    assert device is not None
    if device.arch not in variant.archs:
        raise ValueError(f"variant {variant.name} serves {', '.join(variant.archs)}, not {device.arch}")
    with _registry:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            _kernels[key] = _compile(variant, device, description)
    return _kernels[key][0]


def warm_up(variants: Iterable[TileVariant], workers: int = 4) -> None:
    """Compiles `variants` for `gate.device()`, several at a time; what is compiled already costs nothing.

    Raises:
        NoDeviceError: there is no device to compile for.
    """
    from concurrent.futures import ThreadPoolExecutor

    import tilelang  # noqa: F401  (its import is not safe in several threads)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(kernel, variants))


def find_nvcc() -> tuple[bool, str]:
    """Whether the nvcc that TileLang calls is there, and its path, or why there is none; imports TileLang."""
    try:
        from tilelang.contrib import nvcc

        path = str(nvcc.get_nvcc_compiler())
    except Exception as error:
        return False, f"none found: {error}"
    return (True, path) if Path(path).is_file() else (False, f"none found at {path}")


def shared_bytes(function: Any) -> int:
    """Bytes of the shared arrays of a TIR function; TileLang lays some over each other, so that its kernel may need less."""
    from tilelang import tvm

    arrays: list[Any] = []
    tvm.tirx.stmt_functor.post_order_visit(
        function.body, lambda node: arrays.extend(getattr(node, "alloc_buffers", ()))
    )
    total = 0
    for array in arrays:
        if array.scope().startswith("shared"):
            kind = tvm.DataType(array.dtype)
            total += math.prod(map(int, array.shape)) * kind.bits * kind.lanes // 8
    return total


def lower(variant: TileVariant, arch: str) -> Lowered:
    """Lowers `variant` for `arch` (such as `sm80`) and compiles it to PTX with nvcc; needs no GPU.

    Raises:
        Exception: whatever TileLang or nvcc raises when it does not compile.
    """
    import tilelang
    from tilelang import tvm

    description = tvm.target.Target({"kind": "cuda", "arch": _sm(arch)})
    # host code is made and thrown away; LLVM for it is not always there
    with description, tvm.transform.PassContext(opt_level=3, config=dict(variant.pass_configs)):
        lowered = tilelang.lower(variant.build(), target=description, target_host="c")
        ptx = _nvcc(lowered.kernel_source, arch, variant)
    threads, shared = _launch(lowered.device_mod)
    return Lowered(lowered.kernel_source, ptx, threads, shared)


def _check_fits(variant: TileVariant, needed: int, device: gate.Device) -> None:
    if needed > device.smem_limit:
        raise SharedMemoryError(
            f"variant {variant.name} takes {needed:,} bytes of shared memory, a CTA on {device.arch} may have "
            f"{device.smem_limit:,}"
        )


def _compile(variant: TileVariant, device: gate.Device, description: dict[str, Any]) -> tuple[Any, int]:
    try:
        import tilelang

        # tracing a kernel is not safe in several threads, compiling it is
        with _tracing:
            function = variant.build()
            needed = shared_bytes(function)
        _check_fits(variant, needed, device)
        options = dict(variant.pass_configs) or None
        return tilelang.compile(function, target=description, pass_configs=options), needed
    except SharedMemoryError:
        raise
    except Exception as error:
        raise CompileError(
            f"kernel {variant.name} does not compile for {description['arch']} with TileLang and nvcc "
            f"({find_nvcc()[1]}); {DISABLE_OPS} leaves its op to stock. {type(error).__name__}: {str(error)[:500]}"
        ) from error


def _nvcc(source: str, arch: str, variant: TileVariant) -> str:
    """PTX of `source` with the options that TileLang's own compilation uses."""
    from tilelang.contrib import nvcc
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    options = ["-std=c++20", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    flags = variant.pass_configs.get("tl.device_compile_flags", ())
    options += [flags] if isinstance(flags, str) else list(flags)
    if variant.pass_configs.get("tl.enable_fast_math"):
        options.append("--use_fast_math")
    return bytes(nvcc.compile_cuda(source, "ptx", [f"-arch={_sm(arch)}"], options=options)).decode()


def _launch(device_mod: Any) -> tuple[int, int]:
    """Threads and dynamic shared memory of the one kernel in a lowered module."""
    (function,) = device_mod.functions.values()
    threads = 1
    for axis in "xyz":
        threads *= int(function.attrs["thread_extent"].get(f"threadIdx.{axis}", 1))
    return threads, int(function.attrs.get("dyn_shared_memory_buf", 0))


def _sm(arch: str) -> str:
    return arch.replace("sm", "sm_")
