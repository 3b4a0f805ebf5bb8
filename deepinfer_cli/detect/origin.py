"""What a target's files were before anyone touched them."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.detect.target import LAYOUTS, PACKAGE, Target, TargetKind
from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook

_STOCK, _FORK = LAYOUTS


@dataclass(frozen=True)
class Origin:
    """The pristine oracle of one target.

    A fork that only renamed the model folder (`deepseek_v41` to `deepseek_v4_1`, imports rewritten) keeps a RECORD, or
    has a manifest, of the stock names. There a file is pristine when it equals the stock file once the name is written
    the stock way; its hash is then that of the file as it is, without our block.

    Attributes:
        source: `RECORD`, `HEAD`, `manifest` or `none`.
    """

    source: str
    _lookup: Callable[[str], str | None]

    @classmethod
    def of(cls, target: Target) -> Origin:
        """The oracle for `target`: its commit, else its RECORD, else the manifest.

        Raises:
            FailedError: a checkout, and git is missing or the repository unreadable.
        """
        if target.kind is TargetKind.CHECKOUT:
            return cls("HEAD", _Head(target))
        rows = _record_rows(target)
        if rows:
            return cls("RECORD", _Recorded(target, rows))
        rows = _manifest_rows(target)
        return cls("manifest", _Listed(target, rows)) if rows else cls("none", lambda path: None)

    def sha256(self, path: str) -> str | None:
        """The pristine hash of `path` (`vllm/…`), None when unknown."""
        return self._lookup(path)


@dataclass(frozen=True)
class _Listed:
    """Hashes from a list, which may name the stock layout where the target has the fork's."""

    target: Target
    rows: dict[str, str]

    def __call__(self, path: str) -> str | None:
        stock_path = path.replace(f"/{_FORK}/", f"/{_STOCK}/")
        if path in self.rows or stock_path not in self.rows:
            return self.rows.get(path)
        for content in originals(self.target.path(path)):
            if _hex(content.replace(_FORK.encode(), _STOCK.encode())) == self.rows[stock_path]:
                return _hex(content)
        return self.rows[stock_path]


class _Recorded(_Listed):
    """Hashes from RECORD; from the manifest where RECORD has a row without a usable hash, or none."""

    def __call__(self, path: str) -> str | None:
        found = super().__call__(path)
        # reading the manifest is slow, and `status` asks for files of other releases too
        if found is None and self.target.path(path).is_file():
            found = _Listed(self.target, _manifest_rows(self.target))(path)
        return found


@dataclass(frozen=True)
class _Head:
    """Hashes of the blobs at a checkout's HEAD; where the overlay itself was committed, without our block."""

    target: Target

    def __call__(self, path: str) -> str | None:
        # GitPython raises at import where there is no git
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        folder = self.target.parent
        try:
            import git

            repo = git.Repo(folder)
            # inside a git hook these name another repository
            repo.git.update_environment(GIT_DIR=str(self.target.git_dir), GIT_WORK_TREE=str(folder))
            blob = repo.head.commit.tree / path
            return _hex(hook.strip(blob.data_stream.read()))
        except KeyError:
            return None
        except Exception as error:
            raise FailedError(
                f"the checkout {folder} cannot be compared with its HEAD: {error or type(error).__name__}",
                code="git-unavailable",
                hint=f"a checkout needs a git that can read it: try `git -C {folder} log -1`",
            ) from error


def originals(path: Path) -> tuple[bytes, ...]:
    """What the file at `path` may have been before our block was appended; empty when it cannot be read."""
    try:
        source = path.read_bytes()
    except OSError:
        return ()
    return hook.originals(source) if hook.find(source) else (source,)


def _record_rows(target: Target) -> dict[str, str]:
    """The rows of RECORD that are about vLLM's package and have a sha256."""
    try:
        text = (target.dist_info / "RECORD").read_text(encoding="utf-8") if target.dist_info else ""
        return {
            row[0]: base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "=").hex()
            for row in csv.reader(text.splitlines())
            if len(row) > 1 and row[0].startswith(f"{PACKAGE}/") and row[1].startswith("sha256=")
        }
    except (OSError, UnicodeDecodeError, csv.Error, binascii.Error):
        return {}


def _manifest_rows(target: Target) -> dict[str, str]:
    """The listed files of the release that most of the target's hookable files equal.

    When none does: of the release that the target claims to be; empty when that is not listed.
    """
    from deepinfer_cli.overlay import manifest

    best: dict[str, str] = {}
    most = 0
    for release in manifest.load().releases.values():
        rows = {
            f"{PACKAGE}/{module.replace('{layout}', _STOCK)}": item for module, item in release.files.items()
        }
        listed = _Listed(target, rows)
        paths = [path for path in map(target.module_path, release.files) if path]
        equal = sum(listed(path) in _hashes(target.path(path)) for path in paths)
        claimed = release.version == target.version
        if equal > most or (equal == most and claimed):
            best, most = rows, equal
    return best


def _hashes(path: Path) -> set[str]:
    return {_hex(content) for content in originals(path)}


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
