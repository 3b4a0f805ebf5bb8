"""Add vLLM releases to the manifest: `python scripts/add_release.py 0.34.0`.

Fetches the release's wheel, fingerprints every symbol the ops name, hashes the modules that get a hook, and rewrites
the payload's manifest.toml. Without versions it fills in what the listed releases lack, such as the fingerprints of a
new op's symbols; `--all` computes all of them again, `--check` writes nothing and fails when the file would change.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from packaging.version import Version

from deepinfer_cli.detect import wheel
from deepinfer_cli.detect.target import LAYOUTS
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import match, payload
from deepinfer_cli.overlay.manifest import Manifest, Release

HEADER = """\
# What the overlay replaces in vLLM, what it relies on there, and what those symbols are in each supported release.
# The ops are written by hand; everything below `releases` is written by scripts/add_release.py.
"""


def release(manifest: Manifest, version: str, tree: Path) -> Release:
    """The fingerprints and hashes of the vLLM folder `tree`."""

    def path(module: str) -> Path:
        return tree / module.replace("{layout}", LAYOUTS[0])

    def read(module: str) -> bytes | None:
        return path(module).read_bytes() if path(module).is_file() else None

    found = Release(version, match.observe(manifest, read), {})
    files = {
        module: hashlib.sha256(path(module).read_bytes()).hexdigest() for module in manifest.hooked(found)
    }
    return Release(version, found.fingerprints, files)


def main(argv: list[str] | None = None) -> int:
    """Rewrite (or check) the manifest; the exit code is 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="compute the listed releases again, too")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when something would change"
    )
    options = parser.parse_args(argv)
    path = payload.bundled().root / "manifest.toml"
    old = path.read_text(encoding="utf-8")
    known = manifests.parse(old, check=False)
    keys = {symbol.key for symbol in known.symbols}
    releases = {}
    for version in sorted({*known.releases, *options.versions}, key=Version):
        listed = known.releases.get(version)
        if (
            listed
            and not options.all
            and version not in options.versions
            and set(listed.fingerprints) == keys
            and set(listed.files) == set(known.hooked(listed))
        ):
            releases[version] = listed
        else:
            tree = wheel.cached_tree(version, on_progress=lambda text: print(text, file=sys.stderr))
            releases[version] = release(known, version, tree)
    new = manifests.dump(Manifest(known.ops, releases), HEADER)
    manifests.parse(new)
    if options.check:
        print("manifest.toml is current" if new == old else "manifest.toml is not current")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    print(f"{path}: {', '.join(releases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
