"""The small random model: V4.1 at its real widths, few layers and few experts; its folder has no weights.

Eight layers keep every kind there is: two with a sliding window alone, a KV source of ratio 2 with a reader, a KV
source of ratio 1 with readers, and a second index group that picks from the first one's candidate blocks.
Standard library only: the child writes the folder in an interpreter that may have no DeepInfer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCAB = 129_280
HIDDEN = 5_120
HEAD_DIM = 512
HEADS = 64
RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
KV_SOURCES = (2, 4)
INDEX_SOURCES = (2, 4, 6)
CANDIDATE_SOURCE = 4
EXPERTS = 16
EXPERT_WIDTH = 2_304
WINDOW = 128
TOP_K = 512
ENGRAM_LAYERS = (1, 3)
ENGRAM_NGRAM, ENGRAM_HEADS, ENGRAM_DIM = 4, 8, 256
# the primes that size the hash tables are looked for from here on
ENGRAM_FIRST = 2_000
DRAFT_TOKENS = 5
DRAFT_EXPERTS = 16
DRAFT_RANK = 256


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What may differ between two small models.

    Attributes:
        engram: with Engram layers, and a toy tokenizer for their hashes.
        draft: with a DSpark drafter.
        positions: tokens that a sequence may have.
    """

    engram: bool = True
    draft: bool = False
    positions: int = 65_536

    def to_json(self) -> dict[str, Any]:
        """As keyword arguments."""
        return asdict(self)


def write(folder: Path, options: ModelOptions) -> None:
    """Writes `config.json` and, with Engram, the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", config(options))
    if options.engram:
        _dump(folder / "tokenizer.json", tokenizer())
        _dump(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def config(options: ModelOptions) -> dict[str, Any]:
    """The model's `config.json`."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": _text(options),
        "vision_config": _vision(),
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
    }  # fmt: skip


def _text(options: ModelOptions) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": len(RATIOS),
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
        "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
        **_attention(options.positions),
        **_experts(),
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        **_engram(options.engram),
        **_draft(options.draft),
    }  # fmt: skip


def _attention(positions: int) -> dict[str, Any]:
    return {
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "qk_rope_head_dim": 64,
        "q_lora_rank": 1_280, "o_lora_rank": 1_024, "o_groups": 8, "attention_bias": False,
        "max_position_embeddings": positions, "rope_theta": 10_000, "compress_rope_theta": 160_000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": positions // 16,
        },
        "sliding_window": WINDOW, "compress_ratios": list(RATIOS),
        "kv_source_layer_ids": list(KV_SOURCES), "index_source_layer_ids": list(INDEX_SOURCES),
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": TOP_K,
        "candidate_source_layer_id": CANDIDATE_SOURCE, "candidate_topk_blocks": 2_048, "candidate_block_size": 8,
    }  # fmt: skip


def _experts() -> dict[str, Any]:
    return {
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "moe_intermediate_size": EXPERT_WIDTH, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    }  # fmt: skip


def _engram(wanted: bool) -> dict[str, Any]:
    layers = ENGRAM_LAYERS if wanted else ()
    return {
        "engram_layer_ids": list(layers),
        "engram_num_embeddings": [engram_rows(index) for index in range(len(layers))],
        "engram_max_ngram_size": ENGRAM_NGRAM, "engram_n_heads": ENGRAM_HEADS, "engram_head_dim": ENGRAM_DIM,
        "engram_vocab_size": ENGRAM_FIRST, "engram_compressed_vocab_size": VOCAB // 2, "engram_pad_token_id": 2,
    }  # fmt: skip


def _draft(wanted: bool) -> dict[str, Any]:
    if not wanted:
        return {"num_nextn_predict_layers": 0}
    return {
        "num_nextn_predict_layers": 1, "dspark_block_size": DRAFT_TOKENS, "dspark_markov_rank": DRAFT_RANK,
        "dspark_target_layer_ids": [3, 5, 7], "dspark_noise_token_id": 3,
        "dspark_n_routed_experts": DRAFT_EXPERTS, "dspark_num_experts_per_tok": 3,
    }  # fmt: skip


def _vision() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 1_024,
        "num_attention_heads": 16, "intermediate_size": 2_816, "patch_size": 14, "rope_theta": 10_000.0,
        "downsample_ratio": 3, "max_image_tokens": 1_024, "min_pixels": 295_936,
    }  # fmt: skip


def engram_rows(index: int) -> int:
    """Rows of the `index`-th Engram layer's table: each n-gram size and head has the next prime that is free."""
    used: set[int] = set()
    rows = 0
    for _ in range(index + 1):
        rows = 0
        for _ in range(ENGRAM_NGRAM - 1):
            current = ENGRAM_FIRST - 1
            for _ in range(ENGRAM_HEADS):
                current = _next_prime(current, used)
                used.add(current)
                rows += current
    return rows


def _next_prime(after: int, used: set[int]) -> int:
    number = after + 1
    while number in used or any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def tokenizer() -> dict[str, Any]:
    """A `tokenizer.json` whose ids 2n and 2n+1 differ by a capital letter, so that Engram hashes them alike."""
    words = {f"{'wW'[index % 2]}{index // 2}": index for index in range(VOCAB)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }


def weight_bytes(options: ModelOptions, layers: int = len(RATIOS)) -> int:
    """About what the weights take on one GPU, in bytes, `wo_a` unpacked to bf16; Engram's tables are in host memory."""
    attention = (
        HIDDEN * (1_280 + HEAD_DIM) + 1_280 * HEADS * HEAD_DIM + 8 * 1_024 * HIDDEN + 2 * 8_192 * 4_096
    )
    shared = 3 * HIDDEN * EXPERT_WIDTH
    mixing = 2 * 4 * 24 * 4 * HIDDEN
    layer = attention + shared + mixing + EXPERTS * shared * 17 // 32
    total = layers * layer + 2 * 2 * VOCAB * HIDDEN
    if options.engram:
        total += len(ENGRAM_LAYERS) * 5 * HIDDEN * 3 * ENGRAM_HEADS * ENGRAM_DIM
    if options.draft:
        total += layer + 2 * 2 * VOCAB * DRAFT_RANK + 3 * HIDDEN * HIDDEN
    return total


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
