"""Write patches/<release>/vllm-sm80-deepinfer.patch for every release in the manifest, or check that they are current.

python scripts/make_patches.py            rewrites them
python scripts/make_patches.py --check    exit 1 when one is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_cli.detect import wheel
from deepinfer_cli.detect.vllm import find_target
from deepinfer_cli.overlay import manifest, patchfile, payload
from deepinfer_cli.overlay.plan import plan_install

NAME = "vllm-sm80-deepinfer.patch"
PATCHES = Path(__file__).resolve().parent.parent / "patches"


def patch(version: str) -> bytes:
    """The patch for one release, made from its pristine files."""
    tree = wheel.cached_tree(version, on_progress=lambda text: print(text, file=sys.stderr))
    plan = plan_install(find_target(target=tree.parent), payload.bundled(), manifest.load())
    return patchfile.unified_patch(plan)


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check all patches; the exit code is 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a patch is not current"
    )
    options = parser.parse_args(argv)
    stale = 0
    for version in manifest.load().releases:
        path = PATCHES / version / NAME
        new = patch(version)
        current = path.is_file() and path.read_bytes() == new
        if options.check:
            print(f"{path.relative_to(PATCHES.parent)}: {'current' if current else 'not current'}")
            stale += not current
        elif not current:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new)
            print(f"{path.relative_to(PATCHES.parent)}: written")
    if stale:
        print("run: python scripts/make_patches.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
