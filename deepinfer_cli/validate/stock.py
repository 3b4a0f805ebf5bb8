"""Loads functions of a real vLLM inside a worker, with the overlay off and no model; nothing of it is copied here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS = ("deepseek_v41", "deepseek_v4_1")
# how a function is loaded: as it is, as a second copy whose Triton kernels are compiled apart, and the mHC functions
# on the path that vLLM takes on an Ampere card
PLAIN, COPY, MHC = "plain", "copy", "mhc"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a function of vLLM is.

    Attributes:
        module: by import name; `{layout}` stands for V4.1's folder.
        symbol: the function's name in it.
        hollow: a package above it that would import far more than is needed, and is replaced by an empty one.
        how: one of the ways above.
    """

    module: str
    symbol: str
    hollow: str = ""
    how: str = PLAIN


def layout_of(package: Path) -> str:
    """The V4.1 folder below `package`/models.

    Raises:
        FileNotFoundError: there is none.
    """
    for layout in LAYOUTS:
        if (package / "models" / layout).is_dir():
            return layout
    raise FileNotFoundError(f"{package} has no DeepSeek-V4.1")


def load(parent: Path | None, source: Source) -> tuple[Callable[..., Any], str]:
    """The target's own function and its file, with the overlay switched off while its module is imported.

    Args:
        parent: folder of the target's `vllm`.

    Raises:
        ImportError: this vLLM cannot be imported here, or another one was.
        Exception: whatever vLLM raises during its import.
    """
    if parent is None:
        raise ImportError("no vLLM was named, so there is no stock function to measure")
    module_name, hollow = source.module, source.hollow
    if "{layout}" in module_name:
        layout = layout_of(parent / "vllm")
        module_name, hollow = module_name.format(layout=layout), hollow.format(layout=layout)
    if str(parent) not in sys.path:
        sys.path.insert(0, str(parent))
    with overlay_off():
        vllm = importlib.import_module("vllm")
        if Path(str(vllm.__file__)).resolve().parent != (parent / "vllm").resolve():
            raise ImportError(f"vllm came from {vllm.__file__}, not from {parent}")
        module = import_alone(module_name, hollow, parent)
        if source.how == COPY:
            module = second_copy(module)
        function = getattr(module, source.symbol)
        if source.how == MHC:
            function = Mhc(function)
    if hasattr(function, "__deepinfer__"):
        raise ImportError(f"{source.symbol} is bound to the overlay although it is switched off")
    return function, str(module.__file__)


def import_alone(name: str, hollow: str, parent: Path) -> types.ModuleType:
    """The module `name`, without what the package `hollow` above it would import."""
    if hollow and hollow not in sys.modules:
        package = types.ModuleType(hollow)
        package.__path__ = [str(parent.joinpath(*hollow.split(".")))]
        sys.modules[hollow] = package
        try:
            return importlib.import_module(name)
        except Exception:
            # something there does need the whole package
            for loaded in [key for key in sys.modules if f"{key}.".startswith(f"{hollow}.")]:
                del sys.modules[loaded]
    return importlib.import_module(name)


def second_copy(module: types.ModuleType) -> types.ModuleType:
    """The same file once more: a Triton kernel keeps its first code for a card, whatever is forced later."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}__copy", str(module.__file__))
    if spec is None or spec.loader is None:
        raise ImportError(f"{module.__file__} cannot be loaded a second time")
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    with _replaced(sys.modules.get("vllm.utils.torch_utils"), direct_register_custom_op=_nothing):
        spec.loader.exec_module(copy)
    return copy


class Mhc:
    """An mHC function on the path that it takes on an Ampere card: without DeepGEMM, without programmatic dependent launch.

    TileLang compiles for the card at hand all the same. The kernels hold vLLM's second answer, so they are copies of
    their modules that nothing else uses.
    """

    _KERNELS = (
        "vllm.model_executor.kernels.mhc.tilelang_kernels",
        "vllm.model_executor.kernels.mhc.warmup",
    )
    _copies: dict[str, types.ModuleType] = {}  # noqa: RUF012

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__signature__ = _signature(function)
        if not self._copies:
            with self._path({}):
                self._copies.update({name: importlib.import_module(name) for name in self._KERNELS})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it on that path."""
        with self._path(self._copies):
            return self._function(*args, **kwargs)

    @contextmanager
    def _path(self, modules: dict[str, types.ModuleType]) -> Iterator[None]:
        before = {name: sys.modules.pop(name, None) for name in self._KERNELS}
        sys.modules.update(modules)
        deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
        platform = type(importlib.import_module("vllm.platforms").current_platform)
        try:
            with (
                _replaced(deep_gemm, is_deep_gemm_supported=_no),
                _replaced(platform, is_arch_support_pdl=classmethod(_no)),
            ):
                yield
        finally:
            for name, module in before.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module


def _signature(function: Callable[..., Any]) -> Any:
    import inspect

    return inspect.signature(function)


def _no(*_args: Any) -> bool:
    return False


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within it `owner`, a module or a class, has these attributes; without an owner nothing happens."""
    names = values if owner is not None else {}
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def overlay_off() -> Iterator[None]:
    """Within it a module that is imported binds nothing."""
    before = os.environ.get("DEEPINFER_DISABLE")
    os.environ["DEEPINFER_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEPINFER_DISABLE"]
        else:
            os.environ["DEEPINFER_DISABLE"] = before
