"""The `DEEPINFER_*` variables of this shell, before anything is checked: a vLLM started with wrong ones would stop."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer_cli.errors import UsageError
from deepinfer_cli.overlay import manifest


def check_switches(root: Path) -> None:
    """Refuses what the overlay at `root` would refuse when vLLM starts.

    Raises:
        UsageError: a value means nothing, or names an op that is none or replaces nothing (`switch-invalid`).
    """
    from deepinfer_sm80 import gate

    try:
        # the others are not read then
        if gate.disabled():
            return
        if os.environ.get(gate.DISABLE_OPS):
            known = manifest.load(root / "manifest.toml").ops
            gate.disabled_ops(op.name for op in known if op.replaces)
        gate.forced_arch()
    except gate.SwitchError as error:
        raise UsageError(
            str(error),
            code="switch-invalid",
            hint="a vLLM that starts with this variable stops on an SM8x card; correct it or unset it",
        ) from error
