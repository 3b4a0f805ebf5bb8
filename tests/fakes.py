"""Small fake vLLMs and a small payload on disk, and what tests do with folders."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.detect.vllm import Target, find_target

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
CACHE_UTILS = "models/{layout}/common/ops/cache_utils.py"
ROCM = "models/{layout}/amd/rocm.py"
ATTENTION = "models/{layout}/attention.py"

# the real manifest's ops, and the modules of the real releases that get a hook block
ACCELERATE = (
    "gather",
    "combine",
    "ragged",
    "sparse_prefill",
    "sparse_decode",
    "mhc_post",
    "mhc_post_with_sqrsum",
    "mhc_pre_delayed",
    "mhc_fused_post_pre_delayed",
    "yoco",
)
ENABLE = (
    "attention",
    "kv_insert",
    "indexer_k",
    "indexer_q",
    "indexer_prefill",
    "indexer_decode",
    "indexer_metadata",
    "fp8_pack",
    "engram",
    "tile_scheduler",
    "swa_replay",
    "pipeline",
)
OPS = ACCELERATE + ENABLE
SHARED_HOOKS = (
    "model_executor/kernels/mhc/tilelang.py",
    "model_executor/kernels/mhc/warmup.py",
    "model_executor/layers/sparse_attn_indexer.py",
    "models/deepseek_v4/common/ops/fused_indexer_q.py",
    "models/{layout}/common/engram.py",
    "models/{layout}/common/ops/fused_compress_quant_cache.py",
    "models/{layout}/common/ops/indexer_k_store.py",
    "models/{layout}/nvidia/model.py",
    "v1/attention/backends/mla/indexer.py",
    "v1/attention/backends/mla/sparse_swa.py",
    "v1/attention/ops/common.py",
    "v1/attention/ops/rocm_aiter_mla_sparse.py",
    "v1/worker/gpu/pp_utils.py",
    "v1/worker/workspace.py",
)


def hooked_paths(version: str, layout: str = "deepseek_v41") -> list[str]:
    """What an install edits in a real release, sorted, from the folder above `vllm` on."""
    own = [CACHE_UTILS, *([ROCM] if version in ("0.30.0", "0.31.0") else [])]
    own.append(f"v1/core/kv_cache_{'planning' if version == '0.33.0' else 'utils'}.py")
    if version != "0.30.0":
        own.append("models/{layout}/nvidia/model_state.py")
    return sorted(f"vllm/{name.replace('{layout}', layout)}" for name in (*own, *SHARED_HOOKS))


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


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a file that may be a hard link to the cache: never write through it."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")


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


def clone(tree: Path, into: Path) -> Path:
    """A copy of a folder that shares every file by hard link where the filesystem can, as uv's site-packages do."""

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
        return target

    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tree, into, ignore=ignore, copy_function=link, dirs_exist_ok=True)
    return into
