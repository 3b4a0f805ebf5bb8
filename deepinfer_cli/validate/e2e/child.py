"""Runs the small model through one vLLM engine, in the interpreter that serves vLLM.

    python child.py REQUEST

REQUEST is a JSON file (`plan.Run.request`). One JSON event per line on stdout: `step` (what begins, with the
seconds since the start), `phase` (a phase's result), `error` (what a step raised), `answer` (about the engine), `done`.
Everything else goes to stderr. A phase that fails does not keep the later ones from running; an engine that does not
start ends the run. Worker processes that vLLM starts by spawning run this file as `__mp_main__` and are prepared alike.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_BEGAN = time.monotonic()
LOADER = "deepinfer_small"

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    """Reads the request, does it, and reports."""
    emit = _event_channel()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        _step(emit, "prepare")
        prepare(request)
        _step(emit, "engine")
        engine = _start(request)
    except (Exception, SystemExit) as error:
        emit({"event": "error", "step": "engine", **describe(error)})
        traceback.print_exc()
        _leave(1)
    from deepinfer_cli.validate.e2e import phases

    emit({"event": "answer", **_attempt(emit, "describe", lambda: phases.describe(engine, request))})
    failed = 0
    for phase in request["phases"]:
        name = phase["name"]
        _step(emit, name)
        result = _attempt(emit, name, functools.partial(phases.run, engine, phase, request))
        failed += not result
        if result:
            emit({"event": "phase", "name": name, "seconds": _seconds(), **result})
    emit({"event": "done", "seconds": _seconds(), "failed_phases": failed})
    _leave(0)
    return 0


def prepare(request: dict[str, Any]) -> None:
    """Everything that must be so in each process before vLLM decides anything by it."""
    _borrow_package()
    _check_vllm(request.get("parent"))
    if request.get("capability"):
        _pretend(request["capability"])
    from deepinfer_cli.validate.e2e import record

    problem = record.start(Path(request["out"]) / "kernels.jsonl")
    if problem:
        sys.stderr.write(f"kernels are not recorded: {problem}\n")
    _register_loader(request)
    if request.get("plugin"):
        _plugin(request["plugin"]).prepare(request)


def _borrow_package() -> None:
    """Makes `deepinfer_cli.validate.e2e` importable from beside this file, and nothing else of its environment."""
    if "deepinfer_cli" not in sys.modules:
        package = types.ModuleType("deepinfer_cli")
        package.__path__ = [str(_HERE.parents[1])]
        sys.modules["deepinfer_cli"] = package
    # python puts the script's folder first, where `model` or `plan` could shadow a user's module
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]


def _check_vllm(parent: str | None) -> None:
    """Raises ImportError where Python finds another vLLM than the one in `parent`."""
    import vllm

    found = Path(next(iter(vllm.__path__))).resolve()
    if parent and found != Path(parent).resolve() / "vllm":
        raise ImportError(f"Python imports the vLLM in {found}, not the one in {parent}")


def _pretend(capability: list[int]) -> None:
    """Makes vLLM see another compute capability; Triton is told through its environment variable."""
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    seen = DeviceCapability(major=capability[0], minor=capability[1])
    answer = classmethod(lambda _cls, device_id=0: seen)
    for platform in (cuda.NvmlCudaPlatform, cuda.NonNvmlCudaPlatform):
        platform.get_device_capability = answer
        # asks PyTorch, which knows the real card
        platform.is_arch_support_pdl = classmethod(lambda _cls: capability[0] >= 9)
    _tell_payload_the_card()


def _tell_payload_the_card() -> None:
    """Lets the overlay know the card that is really there: TileLang's code is assembled for that one."""
    import vllm

    if not (Path(vllm.__path__[0]) / "deepinfer_sm80").is_dir():
        return
    import torch
    from vllm.deepinfer_sm80 import gate

    # not asked before CUDA has started: vLLM forks some of its processes
    gate.capability = lambda: (
        tuple(torch.cuda.get_device_capability()) if torch.cuda.is_initialized() else None
    )


def _register_loader(request: dict[str, Any]) -> None:
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    folder = Path(request["out"])

    @register_model_loader(LOADER)
    class SmallModelLoader(DummyModelLoader):  # type: ignore[misc]
        """Draws the weights by name; what it found is written beside the other results, one file for each model."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            from deepinfer_cli.validate.e2e import weights

            found = weights.fill(model)
            kind = "draft" if "draft" in str(model_config.architectures).lower() else "target"
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            (folder / f"parameters-{kind}-{rank}-{os.getpid()}.json").write_text(json.dumps(found))


def _plugin(path: str) -> Any:
    """A script's own module, for faults to plant."""
    spec = importlib.util.spec_from_file_location("deepinfer_e2e_plugin", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def _start(request: dict[str, Any]) -> Any:
    from deepinfer_cli.validate.e2e import model

    model.write(Path(request["model_dir"]), model.ModelOptions(**request["model"]))
    from vllm import LLM

    return LLM(model=request["model_dir"], load_format=LOADER, **request["engine"])


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: its root cause, where that was raised, and the whole traceback."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    place = ""
    frames = traceback.extract_tb(root.__traceback__)
    if frames:
        place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    return {
        "kind": type(root).__name__,
        "message": str(root)[:3000],
        "place": place,
        "raised": f"{type(error).__name__}: {str(error)[:500]}",
        "traceback": "".join(traceback.format_exception(error))[-12_000:],
    }


def _attempt(emit: Emit, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work`; an event and nothing where it raised."""
    try:
        return work()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        emit({"event": "error", "step": name, **describe(error)})
        return {}


def _step(emit: Emit, name: str) -> None:
    emit({"event": "step", "step": name, "seconds": _seconds()})
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {_seconds():.1f} s: {name}\n")
    sys.stderr.flush()


def _seconds() -> float:
    return round(time.monotonic() - _BEGAN, 2)


def _event_channel() -> Emit:
    """A private copy of stdout for events; whoever prints to stdout from now on prints to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        channel.write(json.dumps(event, default=str) + "\n")
        channel.flush()

    return emit


def _leave(code: int) -> None:
    """Ends the process without the clean-up that can hang in threads of vLLM."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
if __name__ == "__mp_main__":
    prepare(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
