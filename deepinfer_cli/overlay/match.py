"""Does a vLLM fit? Its fingerprints against those of the supported releases."""

from __future__ import annotations

import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from packaging.version import InvalidVersion, Version

from deepinfer_cli.detect.target import LAYOUTS, Target
from deepinfer_cli.overlay import fingerprint, hook
from deepinfer_cli.overlay.manifest import ABSENT, Manifest, Op

UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class OpMatch:
    """One op against the release it fits best.

    Attributes:
        release: that release's version.
        differing: keys of the op's symbols that differ from it; empty when the op fits.
    """

    op: Op
    release: str
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A vLLM against the manifest.

    Attributes:
        kind: `supported`, `compatible`, or None when no release's fingerprints all hold.
        release: the release that fits, or the one that everything is compared with: the one the vLLM claims to be,
            else the one with the fewest differences.
        differing: keys of the symbols that differ from it.
        ops: each op against the release it fits best.
        observed: symbol key → fingerprint, `absent` or `unreadable`.
        listed: whether the version it claims is a supported release.
    """

    kind: str | None
    release: str
    differing: tuple[str, ...]
    ops: tuple[OpMatch, ...]
    observed: dict[str, str]
    listed: bool

    def hooked(self, ops: tuple[str, ...]) -> tuple[str, ...]:
        """The modules in which `ops` replace something here, sorted."""
        symbols = {symbol for item in self.ops if item.op.name in ops for symbol in item.op.replaces}
        return tuple(sorted({symbol.module for symbol in symbols if self.observed[symbol.key] != ABSENT}))


def observe(manifest: Manifest, read: Callable[[str], bytes | None]) -> dict[str, str]:
    """The fingerprint of every symbol of `manifest`; `read` gives a module's bytes, None when it does not exist."""
    observed = {}
    # sorted, and a module goes first in what they are sorted by
    for module, group in groupby(manifest.symbols, key=lambda symbol: symbol.module):
        symbols = list(group)
        source = read(module)
        plain = None if source is None else hook.strip(source)
        found = _fingerprints(plain, tuple(symbol.name for symbol in symbols))
        observed.update({symbol.key: found[symbol.name] for symbol in symbols})
    return observed


def _fingerprints(source: bytes | None, names: tuple[str, ...]) -> dict[str, str]:
    if source is None:
        return dict.fromkeys(names, ABSENT)
    try:
        return _read(source, names)
    # MemoryError: what Python's parser says of a source that is too deep for it
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return dict.fromkeys(names, UNREADABLE)


# `verify` asks twice; as many modules as four releases have
@lru_cache(maxsize=256)
def _read(source: bytes, names: tuple[str, ...]) -> dict[str, str]:
    return fingerprint.fingerprints(source.decode("utf-8"), names)


def reader(target: Target) -> Callable[[str], bytes | None]:
    """Reads a manifest's modules from `target`."""

    def read(module: str) -> bytes | None:
        path = target.module_path(module)
        try:
            return target.path(path).read_bytes() if path else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            # exists, yet cannot be read: no fingerprint, and never taken for a missing module
            return b"\xff"

    return read


def shown(key: str, layout: str | None) -> str:
    """A symbol's key for people: with the layout folder that the vLLM has."""
    return key.replace("{layout}", layout or LAYOUTS[0])


def match(manifest: Manifest, version: str | None, observed: dict[str, str]) -> Match:
    """`observed` against every release; the one that `version` names goes first, then newer before older."""
    order = _order(manifest, version)
    differing = {name: _differing(manifest, name, tuple(observed), observed) for name in order}
    fitting = next((name for name in order if not differing[name]), None)
    nearest = version if version in manifest.releases else min(order, key=lambda name: len(differing[name]))
    release = fitting or nearest
    kind = None
    if fitting:
        kind = "supported" if fitting == version else "compatible"
    ops = tuple(_match_op(manifest, op, order, release, observed) for op in manifest.ops)
    return Match(kind, release, differing[release], ops, observed, version in manifest.releases)


def _match_op(
    manifest: Manifest, op: Op, order: tuple[str, ...], release: str, observed: dict[str, str]
) -> OpMatch:
    """`op` against the first release it fits; against `release` when it fits none."""
    keys = tuple(symbol.key for symbol in op.symbols)
    for name in (release, *order):
        if not _differing(manifest, name, keys, observed):
            return OpMatch(op, name, ())
    return OpMatch(op, release, _differing(manifest, release, keys, observed))


def _differing(
    manifest: Manifest, name: str, keys: tuple[str, ...], observed: dict[str, str]
) -> tuple[str, ...]:
    known = manifest.releases[name].fingerprints
    return tuple(key for key in keys if observed[key] != known[key])


def _order(manifest: Manifest, version: str | None) -> tuple[str, ...]:
    base = _parse(version).base_version if version else None
    return tuple(
        sorted(
            manifest.releases, key=lambda name: (name == version, name == base, _parse(name)), reverse=True
        )
    )


def _parse(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")
