"""The ops of a payload: which have cases, which only bind, and in what their kernels are written."""

from __future__ import annotations

from pathlib import Path

from deepinfer_cli.errors import UsageError
from deepinfer_cli.overlay import manifest


def ops_of(root: Path) -> tuple[str, ...]:
    """The ops of the payload at `root`: those that have workloads."""
    return tuple(sorted(path.parent.name for path in root.glob("ops/*/workloads.py")))


def bindings_only(root: Path) -> tuple[str, ...]:
    """The ops of the payload at `root` that replace something in vLLM without a kernel of their own."""
    path, with_kernels = root / "manifest.toml", ops_of(root)
    named = manifest.load(path).ops if path.is_file() else ()
    return tuple(sorted(op.name for op in named if op.replaces and op.name not in with_kernels))


def languages_of(root: Path, op: str) -> tuple[str, ...]:
    """What the op's kernels are written in: `triton`, `tilelang`."""
    known = ("triton", "tilelang")
    return tuple(name for name in known if (root / "ops" / op / f"{name}.py").is_file())


def check_known(missing: list[str], root: Path, instead: str) -> None:
    """Why the ops in `missing` have no cases.

    Args:
        missing: names of no op with workloads; not empty.
        instead: what can be done with an op that has no kernel, as a hint.

    Raises:
        UsageError: always. `op-without-kernel`: it is bindings alone; `op-unknown`: there is no such op.
    """
    bare = bindings_only(root)
    unknown = [op for op in missing if op not in bare]
    if unknown:
        raise UsageError(
            f"there is no op {', '.join(unknown)}",
            code="op-unknown",
            hint=f"ops are {', '.join(ops_of(root))}; without a kernel of their own: {', '.join(bare) or 'none'}",
        )
    names = ", ".join(missing)
    raise UsageError(f"{names} has no kernel of its own, so no case", code="op-without-kernel", hint=instead)
