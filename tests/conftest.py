"""Fixtures for all tests: small fake vLLMs, a small payload, and hard-linked copies of real releases."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from deepinfer_cli.detect import wheel
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import match
from deepinfer_cli.overlay.manifest import Manifest, Op, Release, Symbol
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.payload import load as load_payload
from tests.fakes import (
    ATTENTION,
    CACHE_UTILS,
    PAYLOAD,
    RELEASES,
    ROCM,
    FakeVllm,
    clone,
    git,
    snapshot,
    sources,
    write,
    write_dist_info,
)
from tests.pythons import reason

TESTS = Path(__file__).parent

# tests side by side, and what they start, would each take all cores for torch's threads, and wait for one another: no
# tensor of a test is large enough to gain by them
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# what is ignored where the tests were started (in the background, under `nohup`) stays ignored in what they start
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what runs under every Python."""
    for item in items:
        if reason(item.path.relative_to(TESTS).as_posix(), item.name):
            item.add_marker("pythons")


__all__ = ["CACHE_UTILS", "RELEASES", "ROCM", "FakeVllm", "git", "snapshot", "write_dist_info"]


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Callable[..., FakeVllm]:
    """Makes a fake vLLM: `fake_vllm(site=None, version=, layout=, dist_info=True, checkout=False)`."""

    def make(
        site: Path | None = None,
        *,
        version: str = "0.33.0",
        layout: str = "deepseek_v41",
        dist_info: bool = True,
        checkout: bool = False,
    ) -> FakeVllm:
        site = site or tmp_path / "env" / "lib" / "python3.12" / "site-packages"
        write(site / "vllm", sources(version, layout))
        if dist_info and not checkout:
            write_dist_info(site, version)
        if checkout:
            git(site, "init", "-q")
            git(site, "add", "-A")
            git(site, "commit", "-q", "-m", "Start")
        return FakeVllm(site, version, layout)

    return make


@pytest.fixture(scope="session")
def fake_manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A manifest of the fake releases 0.30.0 (rocm.py hooked too) and 0.33.0, ops `gather` and `combine`."""
    ops = (
        Op(
            "gather",
            "accelerate",
            "gather",
            (Symbol(CACHE_UTILS, "gather_cache"),),
            (Symbol(CACHE_UTILS, "BYTES_PER_TOKEN"), Symbol(ATTENTION, "Attention.CHUNK")),
        ),
        Op(
            "combine",
            "accelerate",
            "combine",
            (Symbol(CACHE_UTILS, "combine_indices"), Symbol(ROCM, "combine_indices")),
            (Symbol(ROCM, "Attention.prefill"),),
        ),
    )
    empty = Manifest(ops)
    releases = {}
    for version in ("0.30.0", "0.33.0"):
        files = sources(version)

        def read(module: str, files: dict[str, str] = files) -> bytes | None:
            text = files.get(module.replace("{layout}", "deepseek_v41"))
            return None if text is None else text.encode()

        release = Release(version, match.observe(empty, read), {})
        for module in empty.hooked(release):
            release.files[module] = hashlib.sha256(read(module) or b"").hexdigest()
        releases[version] = release
    manifest = Manifest(ops, releases)
    assert manifests.parse(manifests.dump(manifest)) == manifest
    return manifest


@pytest.fixture
def fake_payload(tmp_path: Path) -> Callable[..., Payload]:
    """Makes a small payload: `fake_payload(version="0.1.0", extra={name: text}, without=(name,))`."""
    count = iter(range(1000))

    def make(
        version: str = "0.1.0", *, extra: dict[str, str] | None = None, without: tuple[str, ...] = ()
    ) -> Payload:
        root = tmp_path / f"payload-{next(count)}" / "deepinfer_sm80"
        files = {name: text.replace("0.1.0", version) for name, text in PAYLOAD.items()} | (extra or {})
        write(root, {name: text for name, text in files.items() if name not in without})
        return load_payload(root)

    return make


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """`once(key, make)`: the text that `make` makes, made once in this session, whichever worker asks first.

    For what takes seconds and that several tests look at; everything that the text depends on is in `key`.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "once"
    folder.mkdir(exist_ok=True)

    def get(key: str, make: Callable[[], str]) -> str:
        path = folder / hashlib.sha256(key.encode()).hexdigest()
        with FileLock(f"{path}.lock"):
            if not path.exists():
                text = make()
                path.write_text(text, encoding="utf-8")
            return path.read_text(encoding="utf-8")

    return get


@pytest.fixture(scope="session")
def user_environment() -> dict[str, str]:
    """The environment before a test moves HOME: pip's settings and the downloaded releases are there."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def pristine_release(user_environment: dict[str, str]) -> Iterator[Callable[[str], Path]]:
    """Version → the cached pristine parent of `vllm`, fetched once; never write below it.

    At the end of the session: no test wrote through a hard link into a release it asked for.
    """
    used: dict[str, Path] = {}

    def get(version: str) -> Path:
        if version not in used:
            # each test that moves HOME would download the release anew
            with mock.patch.dict(os.environ, user_environment, clear=True):
                used[version] = wheel.cached_tree(version).parent
        return used[version]

    yield get
    for version, tree in used.items():
        changed = wheel.changed_files(tree)
        assert not changed, f"the cached vLLM {version} was changed: {changed[:5]}; delete {tree}"


@pytest.fixture
def real_release(tmp_path: Path, pristine_release: Callable[[str], Path]) -> Callable[..., Path]:
    """Version → a folder with that real vLLM, hard-linked to the cache; gives the parent of `vllm`.

    `slim=True` takes the models folder of V4.1, the metadata and the other modules that the manifest names: enough for
    plans and installs, and quick.
    """

    def make(version: str, into: Path | None = None, *, slim: bool = True) -> Path:
        source = pristine_release(version)
        into = into or tmp_path / f"vllm {version}"
        if not slim:
            return clone(source, into)
        (into / "vllm" / "models").mkdir(parents=True)
        for name in ("vllm/models/deepseek_v41", f"vllm-{version}.dist-info"):
            clone(source / name, into / name)
        others = {symbol.module for symbol in manifests.load().symbols if "{layout}" not in symbol.module}
        for name in ("__init__.py", "_version.py", "models/__init__.py", *sorted(others)):
            # a module may be in some releases only
            if (source / "vllm" / name).exists():
                (into / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / "vllm" / name, into / "vllm" / name)
        return into

    return make
