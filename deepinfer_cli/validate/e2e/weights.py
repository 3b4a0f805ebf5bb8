"""Values for the small model's parameters, drawn before vLLM post-processes them.

Every value follows from the parameter's name (and, where vLLM shards it, the rank), so whatever layout an attention
path or a release makes of it, two runs start from one model. Runs in the target's interpreter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

# UE8M0 exponents (127 is 1.0) that give products of unit variance: e4m3 is drawn with deviation 1, random e2m1
# codes have about 2.5
_LINEAR, _EXPERT, _TABLE = 127 - 6, 127 - 8, 127
# exponents vary from block to block, so that a scale that is misplaced or left out shows
_SPREAD = 2
_BYTES_AT_ONCE = 1 << 28
_MOST_HEADS = 128


def fill(model: Any, device: str | None = None) -> list[list[Any]]:
    """Fills every parameter of `model`.

    Args:
        model: a vLLM module whose weights are not post-processed yet.
        device: where the values are drawn, the GPU if left out; one device for all, so that a table in host memory
            gets the same.

    Returns:
        name, shape, dtype and kind of each parameter, in the model's order.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank, sharded = _sharded(model)
    found = []
    for name, parameter in model.named_parameters():
        seed = zlib.crc32(f"{name}@{rank}".encode() if rank and name in sharded else name.encode())
        kind = "meta" if parameter.is_meta else _fill_one(name, parameter, seed, device)
        found.append([name, list(parameter.shape), str(parameter.dtype).removeprefix("torch."), kind])
    return found


def _sharded(model: Any) -> tuple[int, set[str]]:
    """This rank, and the parameters of which each rank holds its own part."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = int(get_tensor_model_parallel_rank())
    names = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if getattr(module, "tp_size", 1) > 1 and "Replicated" not in type(module).__name__
        for name, _ in module.named_parameters(recurse=False)
    }
    return rank, names


def kind_of(name: str, dtype: Any, dims: int, count: int) -> str:
    """What a parameter holds, by its name, dtype, number of dimensions and number of elements."""
    leaf = name.rsplit(".", 1)[-1]
    if dtype in (torch.uint8, getattr(torch, "float8_e8m0fnu", None)):
        if "scale" not in leaf:
            return "e2m1"
        if ".engram.embed_tokens." in name:
            return "table-scale"
        return "expert-scale" if "w13" in leaf or "w2" in leaf else "linear-scale"
    if dtype == torch.float8_e4m3fn:
        return "e4m3"
    if not dtype.is_floating_point:
        return "zeros"
    if "norm" in name and dims == 1:
        return "norm"
    if leaf.endswith("hc_scale") or ("_scale" in leaf and count <= 4):
        return "ones"
    if "bias" in leaf or "base" in leaf:
        return "small"
    if "sink" in leaf:
        return "sink"
    if "embed" in name or "markov_w1" in name or leaf in ("q_weight", "k_weight"):
        return "unit"
    return "matrix"


def _fill_one(name: str, parameter: Any, seed: int, device: str) -> str:
    kind = kind_of(name, parameter.dtype, parameter.dim(), parameter.numel())
    generator = torch.Generator(device=device).manual_seed(seed)
    # a table of gigabytes need not fit on the GPU twice
    flat = parameter.data.view(torch.uint8) if parameter.element_size() == 1 else parameter.data
    for rows in _slices(flat):
        rows.copy_(_values(kind, rows.shape, parameter, generator, device))
    return kind


def _slices(tensor: Any) -> Iterator[Any]:
    if tensor.dim() == 0 or tensor.numel() == 0:
        yield tensor
        return
    step = max(1, _BYTES_AT_ONCE // max(1, tensor[0].numel() * 4))
    yield from tensor.split(step)


def _values(kind: str, shape: Any, parameter: Any, generator: Any, device: str) -> Any:
    """Values to copy; for one-byte parameters their bytes."""

    def normal(deviation: float) -> Any:
        return torch.randn(shape, generator=generator, device=device) * deviation

    def integers(low: int, high: int) -> Any:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

    middle = {"linear-scale": _LINEAR, "expert-scale": _EXPERT, "table-scale": _TABLE}.get(kind)
    if middle is not None:
        return integers(middle - _SPREAD // 2, middle + _SPREAD // 2 + 1)
    if kind == "e2m1":
        return integers(0, 256)
    if kind == "e4m3":
        return normal(1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    if kind in ("zeros", "ones"):
        return torch.full(shape, float(kind == "ones"), device=device)
    if kind == "norm":
        return 1.0 + normal(0.05)
    if kind == "small":
        return normal(0.1)
    if kind == "sink":
        # scores have deviation 1: this takes about a tenth of what 640 rows share, so that losing it shows; FlashMLA pads
        # the heads, and those of the model must be the same with and without
        heads = torch.randn(_MOST_HEADS, generator=generator, device=device)
        return 5.0 + heads[: shape[0]]
    return normal(1.0 if kind == "unit" else float(parameter.shape[-1]) ** -0.5)
