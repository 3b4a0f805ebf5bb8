"""The shape of a DeepSeek-V4.1 model: what its memory is computed from, real or small alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vision:
    """The image encoder.

    Attributes:
        layers: transformer layers.
        hidden: width.
        inner: width of the MLP.
        patch: pixels of a patch's side.
        downsample: patches along a side that become one token.
    """

    layers: int
    hidden: int
    inner: int
    patch: int = 14
    downsample: int = 3


@dataclass(frozen=True, slots=True)
class Engram:
    """The n-gram tables.

    Attributes:
        layers: layers that have one.
        rows: rows of each table.
        row_bytes: bytes of a row: `dim` e4m3 and a scale byte for each 32 of them.
        lookups: rows that a token reads in each layer.
        dim: values of a row.
    """

    layers: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    lookups: int = 24
    dim: int = 256

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim + self.dim // 32


@dataclass(frozen=True, slots=True)
class Shape:
    """One model.

    Attributes:
        ratios: of each layer: tokens that a row of its compressed cache stands for; 0 for a sliding window alone.
        kv_sources: layers that own a compressed cache; those after one read it until the next.
        index_sources: layers that own an indexer.
        positions: longest context.
        draft_layers: DSpark's layers; 0 without a drafter.
        draft_experts: experts of a DSpark layer.
    """

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    experts: int
    expert_width: int = 2_304
    shared_experts: int = 1
    experts_per_token: int = 6
    hidden: int = 5_120
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_rank: int = 1_280
    o_rank: int = 1_024
    o_groups: int = 8
    window: int = 128
    index_heads: int = 32
    index_dim: int = 128
    index_top_k: int = 512
    streams: int = 4
    vocab: int = 129_280
    positions: int = 1_048_576
    engram: Engram = Engram()
    vision: Vision | None = None
    draft_layers: int = 0
    draft_experts: int = 128
    draft_rank: int = 256
    draft_targets: int = 3

    @property
    def layers(self) -> int:
        """Layers, without DSpark's."""
        return len(self.ratios)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers that a pipeline stage may start with, in stock vLLM 0.30 to 0.33.

        A reader of a compressed cache, or of an index, must be on its source's rank (`models/deepseek_v41/attention.py`,
        `DeepseekV4Attention.__init__`, NotImplementedError). Layers of ratio 0 read none.
        """
        return tuple(
            layer for layer in range(1, self.layers) if layer in self.kv_sources or not self.ratios[layer]
        )


def from_config(config: Mapping[str, Any]) -> Shape:
    """The shape that a `config.json` of V4.1 says.

    Raises:
        ValueError: it is no config of V4.1, and what is missing.
    """
    text = config.get("text_config", config)
    try:
        return Shape(
            ratios=tuple(text["compress_ratios"][: text["num_hidden_layers"]]),
            kv_sources=tuple(text["kv_source_layer_ids"]),
            index_sources=tuple(text["index_source_layer_ids"]),
            experts=text["n_routed_experts"],
            expert_width=text["moe_intermediate_size"],
            shared_experts=text["n_shared_experts"],
            experts_per_token=text["num_experts_per_tok"],
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            head_dim=text["head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            q_rank=text["q_lora_rank"],
            o_rank=text["o_lora_rank"],
            o_groups=text["o_groups"],
            window=text["sliding_window"],
            index_heads=text["index_n_heads"],
            index_dim=text["index_head_dim"],
            index_top_k=text["index_topk"],
            streams=text["hc_mult"],
            vocab=text["vocab_size"],
            positions=text["max_position_embeddings"],
            engram=_engram(text),
            vision=_vision(config.get("vision_config")),
            draft_layers=text.get("num_nextn_predict_layers", 0),
            draft_experts=text.get("dspark_n_routed_experts", 0),
            draft_rank=text.get("dspark_markov_rank", 0),
            draft_targets=len(text.get("dspark_target_layer_ids", ())),
        )
    except KeyError as error:
        raise ValueError(f"it says no {error.args[0]!r}: not a config of DeepSeek-V4.1") from None


def _engram(text: Mapping[str, Any]) -> Engram:
    layers: Sequence[int] = text.get("engram_layer_ids", ())
    if not layers:
        return Engram()
    return Engram(
        layers=tuple(layers),
        rows=tuple(text["engram_num_embeddings"]),
        lookups=(text["engram_max_ngram_size"] - 1) * text["engram_n_heads"],
        dim=text["engram_head_dim"],
    )


def _vision(vision: Mapping[str, Any] | None) -> Vision | None:
    if not vision:
        return None
    return Vision(
        layers=vision["num_hidden_layers"],
        hidden=vision["hidden_size"],
        inner=vision["intermediate_size"],
        patch=vision["patch_size"],
        downsample=vision["downsample_ratio"],
    )


# DeepSeek-V4.1-Flash, as its published config has it. Of the image encoder its size alone is known here (weights.py)
FLASH = Shape(
    ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
    kv_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    experts=384,
    engram=Engram(layers=(1, 14), rows=(384_006_168, 384_016_682)),
    draft_layers=3,
)
