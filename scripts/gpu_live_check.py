"""Check an installed overlay in a real vLLM on a real GPU, through vLLM's own modules.

    python scripts/gpu_live_check.py SITE [--layout deepseek_v41] [--warm-up] [--timeout SECONDS] [--output FILE]

SITE is the folder that holds `vllm`, with the overlay installed. Run it with an interpreter that can import that vLLM;
any CUDA card will do, the architecture is forced to sm80. Four children at once, each a fresh process:

    bound    `live.py`: after the import every op is bound, and every holder has our object
    stock    the same with DEEPINFER_DISABLE=1: nothing is bound
    sm80     calls through the callers' globals, in Ampere code (TRITON_OVERRIDE_ARCH), against the oracles; with
             `--warm-up` after all was compiled that an engine compiles, and nothing of ours may be compiled then
    native   the same calls in this card's code, against the oracles and against stock's functions

The exit code is 0 if all is well; the result is JSON, on stdout and in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIVE = Path(__file__).parents[1] / "deepinfer_cli" / "validate" / "live.py"
CALLS = Path(__file__).with_name("gpu_live_calls.py")
OPS = (
    "combine",
    "gather",
    "ragged",
    "sparse_prefill",
    "sparse_decode",
    "mhc_post",
    "mhc_pre_delayed",
    "mhc_fused_post_pre_delayed",
)
# where there is one of that name; who holds the fused mHC step has another in 0.30
CALLERS = (
    "amd.rocm",
    "nvidia.flashmla",
    "nvidia.model",
    "nvidia.ops.mhc",
    "nvidia.ops.mega_mhc",
    "nvidia.dspark",
)
TIMEOUT_S = 240.0


def main() -> int:
    """Run the four children and write what they found."""
    options = _options()
    modules = _hooked(options.site, options.layout)
    callers = [f"vllm.models.{options.layout}.{name}" for name in _callers(options)]
    request = {
        "parent": str(options.site),
        "layout": options.layout,
        "modules": modules,
        "also": [name for name in callers if name not in modules],
        "expect": list(OPS),
        "skipped": [],
    }
    bound, stock = {**request, "mode": "bound"}, {**request, "mode": "stock"}
    with ThreadPoolExecutor(4) as pool:
        started = {
            "bound": pool.submit(_live, options, bound, DEEPINFER_FORCE_ARCH="sm80"),
            "stock": pool.submit(_live, options, stock, DEEPINFER_DISABLE="1"),
            "sm80": pool.submit(_child, options, DEEPINFER_FORCE_ARCH="sm80", TRITON_OVERRIDE_ARCH="sm80"),
            "native": pool.submit(_child, options, DEEPINFER_FORCE_ARCH="sm80"),
        }
        checks = {name: check.result() for name, check in started.items()}
    result = {
        "schema_version": 1,
        "ok": all(check["ok"] for check in checks.values()),
        "site": str(options.site),
        "hooked": modules,
        "checks": checks,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if result["ok"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=lambda text: Path(text).resolve())
    parser.add_argument("--layout", default="deepseek_v41")
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds that a child may take")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _callers(options: argparse.Namespace) -> list[str]:
    folder = options.site / "vllm" / "models" / options.layout
    return [name for name in CALLERS if (folder / f"{name.replace('.', '/')}.py").is_file()]


def _hooked(site: Path, layout: str) -> list[str]:
    """The modules that have our block, by import name."""
    folders = (f"models/{layout}", "model_executor/kernels", "v1/attention")
    files = sorted(file for folder in folders for file in (site / "vllm" / folder).rglob("*.py"))
    hooked = [file for file in files if "_deepinfer_bind(__name__" in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(site).with_suffix("").parts) for file in hooked]


def _environment(site: Path, switches: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    path = os.pathsep.join(filter(None, [str(site), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **switches}


def _run(
    command: list[str], env: dict[str, str], timeout: float, request: str = ""
) -> subprocess.CompletedProcess[str]:
    """A finished child; one that took too long has exit code 124."""
    try:
        return subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {timeout:g} s")


def _live(options: argparse.Namespace, request: dict[str, Any], **switches: str) -> dict[str, Any]:
    began = time.perf_counter()
    env = _environment(Path(request["parent"]), switches)
    run = _run([sys.executable, str(LIVE)], env, options.timeout, json.dumps(request))
    if run.returncode or not run.stdout.strip():
        return {"ok": False, "exit_code": run.returncode, "stderr": run.stderr[-3000:]}
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    answer["seconds"] = round(time.perf_counter() - began, 1)
    answer["log"] = [line for line in run.stderr.splitlines() if "DeepInfer" in line]
    return answer


def _child(options: argparse.Namespace, **switches: str) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        ampere = "TRITON_OVERRIDE_ARCH" in switches
        stock = "ignore-stock" if ampere else "compare-stock"
        warm = "warm" if ampere and options.warm_up else "cold"
        command = [sys.executable, str(CALLS), str(answer), options.layout, stock, warm, *_callers(options)]
        env = _environment(options.site, switches)
        run = _run(command, env, options.timeout)
        calls = json.loads(answer.read_text()) if answer.exists() else []
    if run.returncode:
        return {"ok": False, "exit_code": run.returncode, "stderr": run.stderr[-3000:], "calls": calls}
    ok = bool(calls) and all(call["ok"] for call in calls)
    return {"ok": ok, "seconds": round(time.perf_counter() - began, 1), "calls": calls}


if __name__ == "__main__":
    sys.exit(main())
