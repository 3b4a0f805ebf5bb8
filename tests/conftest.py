"""Fixtures for all tests: small fake vLLMs, a small payload, and hard-linked copies of real releases."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepinfer_cli.detect import wheel
from deepinfer_cli.detect.vllm import Target, find_target
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import match
from deepinfer_cli.overlay.manifest import Manifest, Op, Release, Symbol
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.payload import load as load_payload

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
CACHE_UTILS = "models/{layout}/common/ops/cache_utils.py"
ROCM = "models/{layout}/amd/rocm.py"
ATTENTION = "models/{layout}/attention.py"

# module → source, for the newest fake release; 0.30.0 also has a rocm.py with a combiner of its own
SOURCES = {
    "__init__.py": '"""A small stand-in."""\n',
    "platforms.py": "current_platform = None\n",
    "models/__init__.py": "",
    "models/{layout}/__init__.py": "",
    "models/{layout}/common/__init__.py": "",
    "models/{layout}/common/ops/__init__.py": "",
    "models/{layout}/amd/__init__.py": "",
    CACHE_UTILS: (
        '"""Cache helpers — with a non-ASCII dash."""\n\nBYTES_PER_TOKEN = 584\n\n\n'
        'def gather_cache(out, cache, lens):\n    """Gather."""\n    return f\'{out}:{cache}:{lens}\'\n\n\n'
        "def combine_indices(topk, window):\n    return topk + window\n"
    ),
    ROCM: (
        "from vllm.models.{layout}.common.ops.cache_utils import combine_indices, gather_cache\n\n\n"
        "class Attention:\n    def prefill(self, out):\n        gather_cache(out, 1, 2)\n"
        "        return combine_indices(1, 2)\n"
    ),
    ATTENTION: "class Attention:\n    CHUNK: int = 4\n",
}
OLD_ROCM = (
    "from vllm.models.{layout}.common.ops.cache_utils import gather_cache\n\n\n"
    "def combine_indices(topk, window):\n    return window + topk\n\n\n"
    "class Attention:\n    def prefill(self, out):\n        gather_cache(out, 1, 2)\n"
    "        return combine_indices(1, 2)\n"
)
PAYLOAD = {
    "__init__.py": '"""A small payload."""\n\n__version__ = "0.1.0"\nCALLS = []\n\n\n'
    "def bind(name, skip=()):\n    CALLS.append((name, skip))\n",
    "gate.py": "def device():\n    return None\n",
    "ops/__init__.py": "",
    "ops/gather.py": "def gather():\n    return 'ours — déjà'\n",
    "manifest.toml": "# read by the CLI alone\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    """Write text files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def sources(version: str, layout: str = "deepseek_v41") -> dict[str, str]:
    """The fake release's files, below the `vllm` folder."""
    files = dict(SOURCES) | {"_version.py": f"__version__ = version = '{version}'\n"}
    if version == "0.30.0":
        files[ROCM] = OLD_ROCM
    return {
        name.replace("{layout}", layout): text.replace("{layout}", layout) for name, text in files.items()
    }


def snapshot(root: Path, *, ignore: tuple[str, ...] = ("__pycache__",)) -> dict[str, tuple[str, int, str]]:
    """Path → (kind, mode, content hash or link) of everything below `root`; what byte-exact means in the tests."""
    result = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if any(part in ignore for part in path.relative_to(root).parts):
            continue
        mode = path.lstat().st_mode & 0o7777
        if path.is_symlink():
            result[name] = ("link", mode, str(path.readlink()))
        elif path.is_dir():
            result[name] = ("dir", mode, "")
        else:
            result[name] = ("file", mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return result


def record_row(path: Path, base: Path) -> str:
    """The RECORD row of one file."""
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(base).as_posix()},sha256={digest},{len(data)}"


def write_dist_info(site: Path, version: str, *, editable: Path | None = None) -> Path:
    """Metadata for the `vllm` folder in `site`; RECORD has a row for each file of it, unless editable."""
    info = site / f"vllm-{version}.dist-info"
    write(
        info, {"METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "INSTALLER": "pip\n"}
    )
    rows = []
    if editable:
        url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))
    else:
        files = [
            path
            for path in (site / "vllm").rglob("*")
            if path.is_file() and "deepinfer_sm80" not in path.parts
        ]
        rows = [record_row(path, site) for path in sorted(files)]
    (info / "RECORD").write_text(
        "\n".join([*rows, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n"
    )
    return info


@dataclass(frozen=True)
class FakeVllm:
    """A fake vLLM on disk; `site` is the parent of its `vllm` folder."""

    site: Path
    version: str
    layout: str

    @property
    def root(self) -> Path:
        return self.site / "vllm"

    @property
    def cache_utils(self) -> Path:
        return self.root / CACHE_UTILS.replace("{layout}", self.layout)

    @property
    def rocm(self) -> Path:
        return self.root / ROCM.replace("{layout}", self.layout)

    def target(self) -> Target:
        return find_target(target=self.site)

    def snapshot(self) -> dict[str, tuple[str, int, str]]:
        return snapshot(self.site, ignore=("__pycache__", ".git"))

    def reinstall(self, version: str | None = None) -> None:
        """What `pip install --force-reinstall` does: replaces what RECORD lists, leaves everything else."""
        for info in self.site.glob("vllm-*.dist-info"):
            shutil.rmtree(info)
        write(self.root, sources(version or self.version, self.layout))
        write_dist_info(self.site, version or self.version)

    def reinstall_record(self) -> None:
        """Make RECORD list the files as they are now: another vLLM of the same version."""
        write_dist_info(self.site, self.version)


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


def git(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, whatever the user's configuration says; repositories above it stay out of sight."""
    identity = {
        f"GIT_{who}_{what}": "test@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **identity,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
    }
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=env, check=check, capture_output=True, text=True
    )


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


def clone(tree: Path, into: Path) -> Path:
    """A copy of a folder that shares every file by hard link where the filesystem can, as uv's site-packages do."""

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
        return target

    shutil.copytree(tree, into, copy_function=link, dirs_exist_ok=True)
    return into


@pytest.fixture(scope="session")
def pristine_release() -> Iterator[Callable[[str], Path]]:
    """Version → the cached pristine parent of `vllm`, fetched once; never write below it.

    At the end of the session: no test wrote through a hard link into a release it asked for.
    """
    used: dict[str, Path] = {}

    def get(version: str) -> Path:
        used[version] = used.get(version) or wheel.cached_tree(version).parent
        return used[version]

    yield get
    for version, tree in used.items():
        changed = wheel.changed_files(tree)
        assert not changed, f"the cached vLLM {version} was changed: {changed[:5]}; delete {tree}"


@pytest.fixture
def real_release(tmp_path: Path, pristine_release: Callable[[str], Path]) -> Callable[..., Path]:
    """Version → a folder with that real vLLM, hard-linked to the cache; gives the parent of `vllm`.

    `slim=True` takes the models folder of V4.1 and the metadata alone: enough for plans and installs, and quick.
    """

    def make(version: str, into: Path | None = None, *, slim: bool = True) -> Path:
        source = pristine_release(version)
        into = into or tmp_path / f"vllm {version}"
        if not slim:
            return clone(source, into)
        (into / "vllm" / "models").mkdir(parents=True)
        for name in ("vllm/models/deepseek_v41", f"vllm-{version}.dist-info"):
            clone(source / name, into / name)
        for name in ("__init__.py", "_version.py", "models/__init__.py"):
            os.link(source / "vllm" / name, into / "vllm" / name)
        return into

    return make
