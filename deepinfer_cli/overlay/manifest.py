"""The manifest: which vLLM symbols each op replaces or relies on, and what they are in each release."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import payload

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ABSENT = "absent"
GROUPS = ("accelerate", "enable")


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A function, method (`Class.method`), class or constant of one vLLM module.

    Attributes:
        module: path below the vLLM package, the layout folder written `{layout}`.
        name: its name at the module's top level, `Class.name`, or `from package.module import name` for what it imports.
    """

    module: str
    name: str

    @property
    def key(self) -> str:
        """`module::name`, unique."""
        return f"{self.module}::{self.name}"

    @classmethod
    def parse(cls, key: str) -> Symbol:
        """The symbol that `key` names."""
        module, _, name = key.partition("::")
        return cls(module, name)


@dataclass(frozen=True, slots=True)
class Op:
    """One op: what it replaces in vLLM, and what has to stay as it is for that to be right."""

    name: str
    group: str
    summary: str
    replaces: tuple[Symbol, ...]
    relies_on: tuple[Symbol, ...]

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """Everything that decides whether this op fits a vLLM."""
        return (*self.replaces, *self.relies_on)


@dataclass(frozen=True, slots=True)
class Release:
    """One vLLM release.

    Attributes:
        fingerprints: symbol key → fingerprint, `absent` where the symbol does not exist.
        files: module → sha256 of the file as published, for modules that may be hooked.
    """

    version: str
    fingerprints: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All ops and all supported releases."""

    ops: tuple[Op, ...]
    releases: dict[str, Release] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """Every symbol any op names, once, sorted."""
        return tuple(sorted({symbol for op in self.ops for symbol in op.symbols}))

    @property
    def enable(self) -> frozenset[str]:
        """The ops without which stock vLLM does not run the model on SM8x."""
        return frozenset(op.name for op in self.ops if op.group == "enable")

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that is hooked in some release, sorted."""
        return tuple(sorted({symbol.module for op in self.ops for symbol in op.replaces}))

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Every module that has a symbol that matters, sorted."""
        return tuple(sorted({symbol.module for symbol in self.symbols}))

    def hooked(self, release: Release, ops: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """The modules that define at least one symbol that `ops` (default all) replace in `release`, sorted."""
        return tuple(
            sorted(
                {
                    symbol.module
                    for op in self.ops
                    if ops is None or op.name in ops
                    for symbol in op.replaces
                    if release.fingerprints.get(symbol.key, ABSENT) != ABSENT
                }
            )
        )


def load(path: Path | None = None) -> Manifest:
    """The manifest at `path`, default the bundled payload's.

    Raises:
        FailedError: the file is missing or not a manifest.
    """
    path = path or payload.bundled().root / "manifest.toml"
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FailedError(
            f"the manifest cannot be read: {error}",
            code="manifest-invalid",
            hint="reinstall DeepInfer with pip",
            paths=(path,),
        ) from error


def parse(text: str, *, check: bool = True) -> Manifest:
    """A manifest's text as data; raises ValueError or KeyError on anything unexpected.

    Without `check`, releases may lack fingerprints that the ops ask for (`scripts/add_release.py` fills them in).
    """
    data = tomllib.loads(text)
    manifest = Manifest(
        ops=tuple(_op(name, item) for name, item in data["ops"].items()),
        releases={
            version: Release(version, dict(item["fingerprints"]), dict(item["files"]))
            for version, item in data.get("releases", {}).items()
        },
    )
    if check:
        _check(manifest)
    return manifest


def _op(name: str, item: dict[str, Any]) -> Op:
    if item["group"] not in GROUPS:
        raise ValueError(f"op {name}: unknown group {item['group']!r}")
    return Op(
        name=name,
        group=item["group"],
        summary=item["summary"],
        replaces=tuple(Symbol.parse(key) for key in item["replaces"]),
        relies_on=tuple(Symbol.parse(key) for key in item["relies_on"]),
    )


def _check(manifest: Manifest) -> None:
    """Every release has a fingerprint for every symbol and a hash for every hooked module, and no others."""
    keys = {symbol.key for symbol in manifest.symbols}
    for release in manifest.releases.values():
        if set(release.fingerprints) != keys:
            wrong = sorted(set(release.fingerprints) ^ keys)
            raise ValueError(f"release {release.version}: fingerprints and ops differ in {', '.join(wrong)}")
        if set(release.files) != set(manifest.hooked(release)):
            raise ValueError(f"release {release.version}: files are not the hooked modules")


def dump(manifest: Manifest, header: str = "") -> str:
    """`manifest` as text; the same manifest always gives the same text."""
    lines = [header.rstrip("\n"), ""] if header else []
    for op in manifest.ops:
        lines += [f"[ops.{op.name}]", f'group = "{op.group}"', f'summary = "{op.summary}"']
        lines += _array("replaces", op.replaces) + _array("relies_on", op.relies_on) + [""]
    for version in manifest.releases:
        release = manifest.releases[version]
        lines += _table(f'releases."{version}".files', release.files)
        lines += _table(f'releases."{version}".fingerprints', release.fingerprints)
    return "\n".join(lines).rstrip("\n") + "\n"


def _array(name: str, symbols: tuple[Symbol, ...]) -> list[str]:
    return [f"{name} = [", *(f'  "{symbol.key}",' for symbol in symbols), "]"]


def _table(name: str, values: dict[str, str]) -> list[str]:
    return [f"[{name}]", *(f'"{key}" = "{values[key]}"' for key in sorted(values)), ""]
