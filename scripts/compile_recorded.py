"""Compile, for other architectures, every Triton kernel that an end-to-end run recorded; needs no GPU.

    python scripts/compile_recorded.py RECORD [RECORD...] [--arch sm80 sm86] [--path FOLDER] [--output FILE]

RECORD is the document of `deepinfer verify --e2e --output`, one run's document.json or kernels.jsonl, or the runs.tar.gz of
`gpu_e2e.py`. Run it with an interpreter that
can import that vLLM (`--path` is put first). The exit code is 1 if a kernel does not compile, or cannot be built again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tarfile
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def main() -> int:
    """Compiles all and writes what failed."""
    options = _options()
    if options.path:
        sys.path.insert(0, str(options.path))
    _pretend_a_gpu()
    kernels = unique(kernel for path in options.records for kernel in read(path))
    failed = []
    for kernel in kernels:
        for arch in options.arch:
            problem = compile_one(kernel, arch)
            if problem:
                failed.append(
                    {
                        "kernel": f"{kernel.get('module')}.{kernel.get('name')}",
                        "arch": arch,
                        "problem": problem,
                    }
                )
    names = {(kernel.get("module"), kernel.get("name")) for kernel in kernels}
    result = {
        "ok": bool(kernels) and not failed,
        "kernels": sorted(".".join(map(str, name)) for name in names),
        "specializations": len(kernels),
        "archs": options.arch,
        "failed": failed,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if result["ok"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--arch", nargs="+", default=["sm80", "sm86"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _pretend_a_gpu() -> None:
    """Without an active driver vLLM's modules define no kernels, and those for AMD cards ask for a device's name."""
    import torch
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    if "amd" in backends:
        backends["amd"].driver.is_active = staticmethod(lambda: False)
    if not torch.cuda.is_available():
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(gcnArchName="")


def read(path: Path) -> list[dict[str, Any]]:
    """The kernels in one record; of several runs those of the ones that ran SM8x code."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".json":
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = [run for run in document.get("data", {}).get("runs", []) if run["arch"]]
        return [kernel for run in runs or [document] for kernel in run.get("kernels", [])]
    runs = [run for run in documents(path).values() if run["generated"]]
    return [kernel for run in runs for kernel in run["kernels"]]


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """The documents in a runs.tar.gz, by the name of their run."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(path) as archive:
        for name in archive.getnames():
            if name.endswith("/document.json") and (stream := archive.extractfile(name)):
                found[name.partition("/")[0]] = json.loads(stream.read())
    return found


def unique(kernels: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each specialization once."""
    found = {json.dumps({**kernel, "warmup": None}, sort_keys=True): kernel for kernel in kernels}
    return list(found.values())


def compile_one(kernel: dict[str, Any], arch: str) -> str:
    """Why the kernel does not compile for `arch`, such as `sm80`; empty if it does."""
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "problem" in kernel:
        return f"it was not recorded: {kernel['problem']}"
    try:
        source = ASTSource(
            function(kernel["module"], kernel["name"]),
            dict(kernel["signature"]),
            {tuple(path): value(one) for path, one in kernel["constexprs"]},
            {tuple(path): value(one) for path, one in kernel["attrs"]},
        )
        chosen = {
            name: kernel["options"][name] for name in OPTIONS if kernel["options"].get(name) is not None
        }
        build(source, target=GPUTarget("cuda", int(arch.removeprefix("sm")), 32), options=chosen)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"
    return ""


def function(module: str, name: str) -> Any:
    """The `JITFunction` of that name, under whatever wraps it."""
    from triton.runtime.jit import JITFunction

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


def value(plain: Any) -> Any:
    """A constexpr's value from its record.

    Raises:
        ValueError: its record is a description alone.
    """
    import triton.language as tl

    if isinstance(plain, list):
        return [value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(value(one) for one in plain["tuple"])
    if "dtype" in plain:
        return tl.dtype(plain["dtype"])
    if "function" in plain:
        return function(*plain["function"])
    raise ValueError(f"a constant that cannot be built again: {plain}")


if __name__ == "__main__":
    sys.exit(main())
