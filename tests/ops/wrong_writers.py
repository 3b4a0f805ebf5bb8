"""Deliberately wrong implementations of the three e4m3 writers, made from their oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepinfer_sm80.ops.indexer_k import reference as indexer_k
from deepinfer_sm80.ops.indexer_q import reference as indexer_q
from deepinfer_sm80.ops.kv_insert import reference as kv_insert
from deepinfer_sm80.ops.rope_quant import reference as parts

Function = Callable[..., Any]
ORACLES: dict[str, Function] = {
    "kv_insert": kv_insert.kv_insert,
    "indexer_k": indexer_k.indexer_k,
    "indexer_q": indexer_q.indexer_q,
}


@contextmanager
def replaced(name: str, value: Function, module: Any = parts) -> Iterator[None]:
    """Within it the oracles' part of that name is another."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


def with_part(op: str, name: str, make: Callable[[Function], Function], module: Any = parts) -> Function:
    """The op's oracle with one part made wrong."""

    def wrong(**kwargs: Any) -> Any:
        with replaced(name, make(getattr(module, name)), module):
            return ORACLES[op](**kwargs)

    return wrong


def _unrotated(_stock: Function) -> Function:
    return lambda x, cos, sin: x


def _rotated_back(stock: Function) -> Function:
    return lambda x, cos, sin: stock(x, cos, -sin)


def _halves_for_pairs(stock: Function) -> Function:
    def neox(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = stock(torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2), cos, sin)
        return torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)

    return neox


def _larger_scale(stock: Function) -> Function:
    return lambda x: torch.where(stock(x) < 128, stock(x) + 1, 128)


def _scale_rounded_down(stock: Function) -> Function:
    return lambda x: torch.where(stock(x) < 128, stock(x * 0.5), 128)


def _no_least_amax(stock: Function) -> Function:
    def scale(x: torch.Tensor) -> torch.Tensor:
        tiny = torch.where(x.isnan(), 0, x).abs().amax(dim=-1) < 1e-4
        return torch.where(tiny, stock(x) - 1, stock(x))

    return scale


def _scale_of_the_first_group(stock: Function) -> Function:
    return lambda x: stock(x)[:, :1].expand(x.shape[:-1]).contiguous()


def _scale_ignored(stock: Function) -> Function:
    return lambda x, exponents: stock(x, torch.zeros_like(exponents))


def _ties_away(stock: Function) -> Function:
    def away(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        return stock((x.double() * (1 + 2.0**-20)), exponents)

    return away


def _truncated(stock: Function) -> Function:
    def cut(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        codes = stock(x, exponents)
        value = codes.view(torch.float8_e4m3fn).double() * torch.pow(2.0, exponents.double())[..., None]
        return torch.where((value.abs() > x.double().abs()) & (codes & 0x7F > 0), codes - 1, codes)

    return cut


def _every_token(_stock: Function) -> Function:
    def all_valid(positions: torch.Tensor, slots: torch.Tensor, ratio: int) -> Any:
        tokens = (slots >= 0).nonzero()[:, 0]
        return tokens, positions[tokens] // ratio * ratio

    return all_valid


def _first_of_the_group(_stock: Function) -> Function:
    def firsts(positions: torch.Tensor, slots: torch.Tensor, ratio: int) -> Any:
        tokens = ((slots >= 0) & (positions[: len(slots)] % ratio == 0)).nonzero()[:, 0]
        return tokens, positions[tokens]

    return firsts


def _turned_at_the_token(stock: Function) -> Function:
    def at(positions: torch.Tensor, slots: torch.Tensor, ratio: int) -> Any:
        tokens, _ = stock(positions, slots, ratio)
        return tokens, positions[tokens]

    return at


def _group_number_as_position(stock: Function) -> Function:
    def at(positions: torch.Tensor, slots: torch.Tensor, ratio: int) -> Any:
        tokens, turned = stock(positions, slots, ratio)
        return tokens, turned // ratio

    return at


def _skipped_slots_are_written(stock: Function) -> Function:
    return lambda positions, slots, ratio: stock(positions, torch.where(slots < 0, 0, slots), ratio)


_QUANT: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "unrotated": ("rotate", _unrotated),
    "rotated-back": ("rotate", _rotated_back),
    "halves-for-pairs": ("rotate", _halves_for_pairs),
    "scale-twice-as-large": ("scale_exponents", _larger_scale),
    "scale-half-as-large": ("scale_exponents", _scale_rounded_down),
    "no-least-amax": ("scale_exponents", _no_least_amax),
    "scale-ignored": ("encode", _scale_ignored),
    "ties-away-from-even": ("encode", _ties_away),
    "truncated": ("encode", _truncated),
}
_WRITE: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "every-token-writes": ("groups_that_end", _every_token),
    "first-token-of-a-group-writes": ("groups_that_end", _first_of_the_group),
    "turned-at-the-last-token": ("groups_that_end", _turned_at_the_token),
    "group-number-as-position": ("groups_that_end", _group_number_as_position),
    "skipped-slots-written": ("groups_that_end", _skipped_slots_are_written),
}


def _table(op: str, entries: dict[str, tuple[str, Callable[[Function], Function]]]) -> dict[str, Function]:
    return {name: with_part(op, part, make) for name, (part, make) in entries.items()}


def _shifted_page(op: str, cache: str) -> Function:
    """The slot's page taken from the shape, not from the stride."""

    def wrong(**kwargs: Any) -> None:
        pages = kwargs[cache]
        close = pages.shape[1] * pages.shape[2]
        tight = torch.as_strided(
            pages, tuple(pages.shape), (close, pages.shape[2], 1), pages.storage_offset()
        )
        ORACLES[op](**{**kwargs, cache: tight})

    return wrong


def _pad_byte_left(**kwargs: Any) -> None:
    cache, slots = kwargs["kv_cache"], kwargs["slot_mapping"]
    kv_insert.kv_insert(**kwargs)
    pool, block_size = parts.pool_of(cache), cache.shape[1]
    kept = slots[slots >= 0]
    at = kept // block_size * cache.stride(0) + block_size * 576 + kept % block_size * 8
    pool[at + 7] = 0xFF


def _rotated_before_quantizing(**kwargs: Any) -> None:
    """As the 528-byte record has it: the rotated part quantized too, here only its scale's place used."""
    cache, slots = kwargs["kv_cache"], kwargs["slot_mapping"]
    kv_insert.kv_insert(**kwargs)
    pool, block_size = parts.pool_of(cache), cache.shape[1]
    kept = slots[slots >= 0]
    at = kept // block_size * cache.stride(0) + block_size * 576 + kept % block_size * 8
    pool[at + 7] = pool[at + 6]


def _norm_forgotten(stock: Function) -> Function:
    return lambda keys, weight, eps: keys


def _weight_forgotten(stock: Function) -> Function:
    return lambda keys, weight, eps: stock(keys, torch.ones_like(weight), eps)


def _epsilon_forgotten(stock: Function) -> Function:
    return lambda keys, weight, eps: stock(keys, weight, 2.0**-126)


def _norm_not_rounded(_stock: Function) -> Function:
    def unrounded(keys: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        root = 1 / (keys.double().square().mean(dim=1) + eps).sqrt()
        return (keys.double() * root[:, None] * weight.double()).float()

    return unrounded


def _scale_not_folded(**kwargs: Any) -> Any:
    codes, _ = indexer_q.indexer_q(**kwargs)
    return codes, kwargs["weights"].float() * kwargs["scale"]


def _factor_forgotten(**kwargs: Any) -> Any:
    return indexer_q.indexer_q(**{**kwargs, "scale": 1.0})


def _first_half_rotated(**kwargs: Any) -> Any:
    first, second = kwargs["q"].chunk(2, dim=-1)
    codes, weights = indexer_q.indexer_q(**{**kwargs, "q": torch.cat([second, first], dim=-1)})
    halves = codes.view(torch.uint8).chunk(2, dim=-1)
    return torch.cat(halves[::-1], dim=-1).view(torch.float8_e4m3fn), weights


def _scale_of_the_token(**kwargs: Any) -> Any:
    def together(stock: Function) -> Function:
        return lambda x: stock(x).amax(dim=-1, keepdim=True).expand(x.shape[:-1])

    return with_part("indexer_q", "scale_exponents", together)(**kwargs)


WRONG: dict[str, dict[str, Function]] = {
    "kv_insert": {
        **_table("kv_insert", _QUANT | _WRITE),
        "scale-of-the-first-group": with_part("kv_insert", "scale_exponents", _scale_of_the_first_group),
        "pages-without-gaps": _shifted_page("kv_insert", "kv_cache"),
        "pad-byte-left": _pad_byte_left,
        "eighth-scale": _rotated_before_quantizing,
    },
    "indexer_k": {
        **_table("indexer_k", _QUANT | _WRITE),
        "pages-without-gaps": _shifted_page("indexer_k", "k_cache"),
        "norm-forgotten": with_part("indexer_k", "normalized", _norm_forgotten, indexer_k),
        "weight-forgotten": with_part("indexer_k", "normalized", _weight_forgotten, indexer_k),
        "epsilon-forgotten": with_part("indexer_k", "normalized", _epsilon_forgotten, indexer_k),
        "norm-not-rounded": with_part("indexer_k", "normalized", _norm_not_rounded, indexer_k),
    },
    "indexer_q": {
        **_table("indexer_q", _QUANT),
        "scale-not-folded": _scale_not_folded,
        "factor-forgotten": _factor_forgotten,
        "first-half-rotated": _first_half_rotated,
        "scale-of-the-token": _scale_of_the_token,
    },
}
