"""Runs vLLM's own `vllm bench serve` in the interpreter that serves vLLM: its parser and its `main`, one import for all.

    python client.py PLAN

PLAN is a JSON file: `events` (a file to append events to), `parent` (where vLLM must come from, or null) and `runs`, each
with `id`, `arguments` (of `vllm bench serve`), `base_url` and `result` (the file that the arguments name). One JSON
event per line: `hello` (versions), `start` (of a run), `run` (its result, and the server's counters before and
after it), `error` (of a run: the next one goes on), `done`.
"""

from __future__ import annotations

import functools
import http.client
import importlib.metadata
import json
import re
import sys
import time
import traceback
import urllib.request
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
# counters of the server that say whether a prompt was cold; summed over engines
COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{[^}]*\})? (?P<value>[-+.eE0-9]+)$", re.MULTILINE)
_KEPT = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput")


def main() -> int:
    """Reads the plan, does its runs in order, and reports each."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # python puts the script's folder first, where `client` or `plan` could shadow a user's module
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
    with Path(plan["events"]).open("a", encoding="utf-8") as events:

        def emit(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            serve, parser = benchmark(plan.get("parent"))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            emit(event="error", id=None, message=_last_words(error))
            return 1
        emit(event="hello", versions=versions())
        for run in plan["runs"]:
            emit(event="start", id=run["id"])
            sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {run['id']}: {' '.join(run['arguments'])}\n")
            try:
                emit(event="run", id=run["id"], **one(serve, parser, run))
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                emit(event="error", id=run["id"], message=_last_words(error))
        emit(event="done")
    return 0


def benchmark(parent: str | None) -> tuple[Any, Any]:
    """vLLM's module of `vllm bench serve`, and a parser with its options.

    Raises:
        ImportError: Python finds another vLLM than the one in `parent`, or `vllm bench` lacks a package.
    """
    import vllm

    found = Path(next(iter(vllm.__path__))).resolve()
    if parent and found != Path(parent).resolve() / "vllm":
        raise ImportError(f"Python imports the vLLM in {found}, not the one in {parent}")
    from vllm.benchmarks import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    # a tokenizer takes longer to load than many a run
    serve.get_tokenizer = functools.lru_cache(maxsize=2)(serve.get_tokenizer)
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    parser.error = _refuse
    return serve, parser


def _refuse(message: str) -> None:
    """What the parser would print, and end the process."""
    raise ValueError(message)


def one(serve: Any, parser: Any, run: dict[str, Any]) -> dict[str, Any]:
    """One `vllm bench serve`.

    Returns:
        result: what vLLM wrote, and each request's `ttfts` and `itls` (seconds), `input_lens`, `output_lens`,
        `errors`; before, after: the server's counters.
    """
    before = counters(run["base_url"])
    serve.main(parser.parse_args(run["arguments"]))
    after = counters(run["base_url"])
    written = json.loads(Path(run["result"]).read_text(encoding="utf-8"))
    kept = {
        name: value for name, value in written.items() if name in _KEPT or name.startswith("spec_decode_")
    }
    for name in ("ttfts", "itls", "input_lens", "output_lens"):
        kept[name] = written.get(name) or []
    kept["errors"] = [str(error)[-400:] for error in written.get("errors") or [] if error]
    return {"result": kept, "before": before, "after": after}


def counters(base_url: str) -> dict[str, float]:
    """Those of `COUNTERS` that the server's /metrics has; empty where it has none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/metrics", timeout=10.0) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return {}
    found: dict[str, float] = {}
    for sample in _SAMPLE.finditer(text):
        if sample["name"] in COUNTERS:
            found[sample["name"]] = found.get(sample["name"], 0.0) + float(sample["value"])
    return found


def versions() -> dict[str, str | None]:
    """Of vLLM and what its kernels are built with; `cuda` is torch's. Starts nothing on a GPU."""
    found = {name: _version(name) for name in ("vllm", "torch", "triton", "tilelang")}
    return found | {"cuda": getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        return str(loaded) if loaded else None


def _last_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


if __name__ == "__main__":
    raise SystemExit(main())
