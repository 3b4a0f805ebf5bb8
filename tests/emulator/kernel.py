"""Runs TileLang kernels on a CPU: the CUDA C++ that they become, compiled by g++ against `device.h`."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Counts(ctypes.Structure):
    """What the last launch executed, per warp: see `device.h`."""

    _fields_ = [(name, ctypes.c_long) for name in ("loads", "conflicts", "products", "barriers", "copies")]


class Deadlock(RuntimeError):
    """Threads wait for each other and none can go on."""


class Kernel:
    """A variant that is called as the compiled one is, with CPU tensors.

    Args:
        variant: an `ops.spec.TileVariant`.
        folder: where the library is built, and kept for the next one with the same source.
        change: edits the CUDA source, to see a fault found.
    """

    def __init__(self, variant: Any, folder: Path, change: Callable[[str], str] = str) -> None:
        import tilelang
        from tilelang import tvm

        target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
        with target, tvm.transform.PassContext(opt_level=3, config=dict(variant.pass_configs)):
            function = variant.build()
            lowered = tilelang.lower(function, target=target, target_host="c")
        (device,) = lowered.device_mod.functions.values()
        self.extents = {axis: str(extent) for axis, extent in device.attrs["thread_extent"].items()}
        self.parameters = [(p.name, function.buffer_map.get(p)) for p in function.params]
        source = change(lowered.kernel_source)
        self.signature = _signature(source)
        self.library = ctypes.CDLL(str(_compile(source, self.signature, folder)))
        self.counts = Counts()
        self.seed = 0

    def __call__(self, *arguments: Any) -> None:
        values: dict[str, Any] = {}
        for (name, buffer), argument in zip(self.parameters, arguments, strict=True):
            if buffer is None:
                values[name] = argument
                continue
            values[buffer.name] = argument.data_ptr()
            assert str(buffer.dtype) == str(argument.dtype).removeprefix("torch.")
            for given, declared in ((argument.shape, buffer.shape), (argument.stride(), buffer.strides)):
                _bind(values, declared, given)
        slots = [_C_TYPES.get(kind, ctypes.c_void_p)(values[name]) for kind, name in self.signature]
        pointers = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        grid = [eval(self.extents.get(f"blockIdx.{axis}", "1"), dict(values)) for axis in "xyz"]
        size = int(self.extents["threadIdx.x"])
        self.seed += 1
        if self.library.run(pointers, (ctypes.c_int * 3)(*grid), size, self.seed, ctypes.byref(self.counts)):
            raise Deadlock


def _bind(values: dict[str, Any], declared: Any, given: tuple[int, ...]) -> None:
    """Gives the variables of a declared shape or its strides their values, and checks the constants."""
    for want, got in zip(declared, given, strict=True):
        if hasattr(want, "name"):
            assert values.setdefault(want.name, got) == got, want.name
        else:
            assert int(want) == got


def _signature(source: str) -> list[tuple[str, str]]:
    """(C type, name) of each parameter of the one kernel."""
    (found,) = set(re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?\w+\(([^)]*)\)", source))
    pairs = (parameter.replace("__restrict__ ", "").rpartition(" ") for parameter in found.split(", "))
    return [(kind, name) for kind, _, name in pairs]


def _compile(source: str, signature: list[tuple[str, str]], folder: Path) -> Path:
    name = re.findall(r"(\w+)\([^)]*\) \{", source)[-1]
    arguments = ", ".join(f"*({kind}*)arguments[{i}]" for i, (kind, _) in enumerate(signature))
    code = re.sub(r"(?m)^#.*(include|alignas|_MSC_VER|ENABLE_BF16|endif).*$", "", source)
    code = (
        f'#include "{HERE / "device.h"}"\n{code}\n'
        'extern "C" int run(void **arguments, const int *grid, int size, unsigned seed, Counts *result) {\n'
        f"  return launch(grid, size, seed, result, [=] {{ {name}({arguments}); }});\n}}\n"
    )
    digest = hashlib.sha256((code + (HERE / "device.h").read_text()).encode()).hexdigest()[:16]
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        (folder / f"{name}-{digest}.cpp").write_text(code)
        options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-fPIC", "-shared"]
        subprocess.run(["g++", *options, "-o", library, library.with_suffix(".cpp")], check=True)
    return library
