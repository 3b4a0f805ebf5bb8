"""Commands in what is printed: completed, so that they can be pasted."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_cli.commands.options import TargetOptions

# in backticks, or all of a text: what a user may paste
_COMMAND = re.compile(
    r"(?:^|(?<=`)|(?<=: ))deepinfer (?P<verb>export \w+|install|rollback|status|verify|bench|doctor|plan)\b(?P<rest>[^`\n]*)"
)
_GIVEN = re.compile(r"--(?:target|python|wheel|help)\b")


def runnable(text: str, where: TargetOptions, arch: str | None = None, *, partial: bool = False) -> str:
    """`text` with every command in it as it works here: which vLLM, which architecture, which `deepinfer`.

    Args:
        arch: the `--arch` that was given.
        partial: whether `--partial` was.
    """

    def complete(found: re.Match[str]) -> str:
        verb, rest = found["verb"], found["rest"]
        if not _GIVEN.search(rest):
            rest += where.arguments
        if verb == "install" and not re.search(r"--(?:arch|help)\b", rest):
            name = arch or _missing_arch()
            rest += f" --arch {name}" if name else ""
        if verb == "install" and partial and not re.search(r"--(?:partial|help)\b", rest):
            rest += " --partial"
        return f"{program()} {verb}{rest}"

    return _COMMAND.sub(complete, text)


def _missing_arch() -> str | None:
    """One to name where no GPU says it."""
    from deepinfer_cli.detect import gpu

    try:
        served = any(one.served for one in gpu.detect_gpus().gpus)
    except Exception:
        # it is only a hint, and must not end what is being done
        return None
    return None if served else next(iter(gpu.SERVED.values()))


def program() -> str:
    """What to type for `deepinfer`: the path it was started by where PATH does not lead to it."""
    called, found = Path(sys.argv[0]), shutil.which("deepinfer")
    if called.name == "__main__.py" and called.parent.name == "deepinfer_cli" and found is None:
        return f"{shlex.quote(sys.executable)} -m deepinfer_cli"
    if called.name == "deepinfer" and called.is_file() and not (found and called.samefile(found)):
        return shlex.quote(sys.argv[0])
    return "deepinfer"
