"""Which attention class and which kernels vLLM would take for DeepSeek-V4.1 on a card, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.render import joined

PORTABLE = "DeepseekV41ROCMAiterMLAAttention"
OURS = "DeepInferSM8xAttention"
FLASHMLA = "DeepseekV4FlashMLAAttention"
ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Choice:
    """What layers run on one kind of card.

    Attributes:
        attention: the class, and why.
        ours: ops that the overlay serves.
        stock: ops that are left to stock there.
        status: `ok`, `note` or `problem`.
        hint: what to do.
    """

    attention: str
    ours: tuple[str, ...] = ()
    stock: tuple[str, ...] = ()
    status: Literal["ok", "note", "problem"] = "ok"
    hint: str = ""


def choose(
    manifest: Manifest,
    served: bool,
    *,
    installed: Collection[str],
    disabled: Collection[str] = (),
    off: bool = False,
) -> Choice:
    """What vLLM takes on a card.

    Args:
        served: the card is SM8x.
        installed: ops that are bound in the target; empty without an overlay.
        disabled: ops that `DEEPINFER_DISABLE_OPS` leaves to stock.
        off: `DEEPINFER_DISABLE` is on.
    """
    if not served:
        return Choice("stock's own choice for this card: the overlay binds nothing on it")
    if not installed:
        return Choice(
            f"{FLASHMLA}: stock takes it for want of another, and FlashMLA has no code for compute capability 8.x: "
            "vLLM stops at its first forward pass",
            status="note",
            hint="deepinfer install",
        )
    bound = (
        () if off else tuple(name for name in _order(manifest) if name in installed and name not in disabled)
    )
    stock = tuple(name for name in _order(manifest) if name not in bound)
    missing = [name for name in stock if name in manifest.enable]
    if off or missing:
        what = "every op" if off else joined(missing)
        return Choice(
            f"{FLASHMLA if off or ATTENTION in missing else OURS}: {what} left to stock, which has no kernels for "
            "compute capability 8.x there: vLLM stops",
            bound,
            stock,
            "problem",
            _way_back(off, missing, disabled),
        )
    if ATTENTION not in bound:
        return Choice("stock's: this overlay has no attention class", bound, stock)
    return Choice(
        f"{OURS}: stock's portable Triton class {PORTABLE} as CUDA layers, for FlashMLA, FlashInfer and mega attention have "
        "no kernels for compute capability 8.x",
        bound,
        stock,
    )


def _way_back(off: bool, missing: Sequence[str], disabled: Collection[str]) -> str:
    if off:
        return "unset DEEPINFER_DISABLE"
    if set(missing) <= set(disabled):
        return f"take {joined(missing)} out of DEEPINFER_DISABLE_OPS"
    return "deepinfer install"


def _order(manifest: Manifest) -> tuple[str, ...]:
    """Ops that replace something, as the manifest lists them."""
    return tuple(op.name for op in manifest.ops if op.replaces)
