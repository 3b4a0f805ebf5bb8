"""Kernel inputs as they are: copies that keep strides and gaps, and fingerprints of their contents."""

from __future__ import annotations

from typing import Any

_CHUNK_BYTES = 1 << 24


def leaves(inputs: dict[str, Any]) -> dict[str, Any]:
    """The tensors among the inputs, those in tuples too: name, or `name.0` → tensor."""
    found = {}
    for name, value in inputs.items():
        items = enumerate(value) if isinstance(value, (tuple, list)) else ()
        found.update({f"{name}.{index}": item for index, item in items if _is_tensor(item)})
        if _is_tensor(value):
            found[name] = value
    return found


def clone_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """A deep copy that keeps strides, gaps between pages, and what shares a storage."""
    storages: dict[int, Any] = {}
    return {name: _clone(value, storages) for name, value in inputs.items()}


# no closure that calls itself: that is a cycle, and would hold every copy until the collector runs
def _clone(value: Any, storages: dict[int, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_clone(item, storages) for item in value)
    if not _is_tensor(value):
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return value.clone()
    if storage.data_ptr() not in storages:
        storages[storage.data_ptr()] = storage.clone()
    copy = storages[storage.data_ptr()]
    return value.new_empty(0).set_(copy, value.storage_offset(), value.shape, value.stride())


def fingerprint(tensor: Any) -> tuple[int, ...]:
    """Two checksums of a tensor's elements, taken in chunks so that a cache of many GiB fits."""
    import torch

    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    if rows.numel() == 0:
        return (0, 0)
    step = max(1, _CHUNK_BYTES * rows.shape[0] // (rows.numel() * rows.element_size()))
    plain = weighted = 0
    for start in range(0, rows.shape[0], step):
        data = rows[start : start + step].contiguous().view(-1).view(torch.uint8).long()
        weights = torch.arange(start + 1, start + 1 + data.numel(), device=data.device)
        plain += int(data.sum())
        weighted ^= int((data * weights).sum())
    return (plain, weighted)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")
