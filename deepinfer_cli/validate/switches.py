"""The `DEEPINFER_*` variables of this shell, before anything is checked: a vLLM started with wrong ones would stop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.errors import UsageError
from deepinfer_cli.overlay import manifest


@dataclass(frozen=True, slots=True)
class Switches:
    """What the variables say.

    Attributes:
        disabled: everything is left to stock; the others are then not read.
        ops: ops that are left to stock.
        forced: architecture whose kernels are used on any card.
    """

    disabled: bool
    ops: tuple[str, ...] = ()
    forced: str | None = None


def read(root: Path) -> Switches:
    """The variables as the overlay at `root` would read them.

    Raises:
        UsageError: a value means nothing, or names an op that is none or replaces nothing (`switch-invalid`).
    """
    from deepinfer_sm80 import gate

    try:
        if gate.disabled():
            return Switches(True)
        # the manifest is not needed where no op is named
        known = manifest.load(root / "manifest.toml").ops if os.environ.get(gate.DISABLE_OPS) else ()
        return Switches(False, gate.disabled_ops(op.name for op in known if op.replaces), gate.forced_arch())
    except gate.SwitchError as error:
        raise UsageError(
            str(error),
            code="switch-invalid",
            hint="a vLLM that starts with this variable stops on an SM8x card; correct it or unset it",
        ) from error
