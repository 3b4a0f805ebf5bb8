"""Asks a vLLM's own planner for the KV pool, in the interpreter that serves it. No GPU is needed, and nothing is loaded on one.

    python vllm_child.py REQUEST

REQUEST is a JSON file (`vllm_check.request`). The cache specifications come from the methods of the release's own layers,
called with stand-ins that hold what these methods read; blocks, tokens and concurrency come from its planner.
Prints one JSON line: `blocks`, `tokens`, `concurrency`, or `error`.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

_RECORD = {"kv_mxfp8": False, "kv_page_alignment": 576, "compressed_bytes_per_token": 584}


def main() -> int:
    """Reads the request and prints the answer."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    here = Path(__file__).resolve().parent
    # python puts the script's folder first, where `shape` or `groups` could shadow a user's module
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    try:
        answer = plan(request)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))  # noqa: T201
    return 0


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of vLLM's planner."""
    config = _config(request)
    specs = [_specs(request, config, stage) for stage in request["stages"]]
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    try:
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        planning = utils
    available = list(request["available"])
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(config, specs)
        found = planning.get_kv_cache_configs(config, specs, available, groups)
    else:
        found = planning.get_kv_cache_configs(config, specs, available)
    tokens, concurrency = utils.get_kv_cache_capacity(config, utils.generate_scheduler_kv_cache_config(found))
    return {"blocks": found[0].num_blocks, "tokens": tokens, "concurrency": concurrency}


def _config(request: dict[str, Any]) -> Any:
    """A stand-in for `VllmConfig` whose derived figures are computed by the release's own properties."""
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheLayout

    traffic = request["traffic"]
    drafting = types.SimpleNamespace(
        num_speculative_tokens=traffic["speculative_tokens"],
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: False,
        use_eagle_block_drop=lambda: False,
        method="dspark",
    )
    layout = KVCacheLayout.BLHNC

    class Config:
        max_concurrent_batches = VllmConfig.max_concurrent_batches
        max_in_flight_tokens = VllmConfig.max_in_flight_tokens
        num_speculative_tokens = VllmConfig.num_speculative_tokens
        num_prefill_lookahead_tokens = getattr(VllmConfig, "num_prefill_lookahead_tokens", 0)
        use_v2_model_runner = True
        diffusion_config = None
        kv_transfer_config = None
        speculative_config = drafting if traffic["speculative_tokens"] else None
        model_config = types.SimpleNamespace(
            max_model_len=traffic["context"],
            original_max_model_len=traffic["context"],
            supports_kv_cache_grouping=False,
            use_mla=True,
            hf_config=types.SimpleNamespace(model_type="deepseek_v41"),
        )
        parallel_config = types.SimpleNamespace(
            tensor_parallel_size=request["tp"],
            pipeline_parallel_size=len(request["stages"]),
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        )
        scheduler_config = types.SimpleNamespace(
            async_scheduling=traffic["async_scheduling"],
            max_num_batched_tokens=traffic["batched_tokens"],
            disable_hybrid_kv_cache_manager=False,
        )
        cache_config = types.SimpleNamespace(
            block_size=traffic["block_size"],
            cache_dtype="fp8_ds_mla",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: layout,
        )
        attention_config = types.SimpleNamespace(hisparse_config=None, indexer_sparse_logits=False)
        device_config = types.SimpleNamespace(device_type="cuda")

    return Config()


def _specs(request: dict[str, Any], config: Any, layers: list[int]) -> dict[str, Any]:
    """One worker's specifications, as `get_kv_cache_spec` of its layers would return them."""
    import torch

    attention = importlib.import_module("vllm.models.deepseek_v41.attention")
    compressor = importlib.import_module("vllm.models.deepseek_v41.compressor")
    window = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    shape, found = request["shape"], {}

    def ask(name: str, cls: Any, **held: Any) -> None:
        found[name] = cls.get_kv_cache_spec(types.SimpleNamespace(**held), config)

    for layer in layers:
        prefix, ratio = f"model.layers.{layer}.attn", (shape["ratios"] + [0] * 64)[layer]
        cached = {"cache_config": config.cache_config, "head_dim": shape["head_dim"], "dtype": torch.uint8}
        ask(f"{prefix}.swa_cache", window.DeepseekV4SWACache, block_size=32, window_size=shape["window"],
            packed_bytes_per_token=584, packed_page_alignment=576, packed_block_stride_alignment=None,
            bounded_replay=True, **cached)  # fmt: skip
        if layer not in shape["kv_sources"]:
            continue
        ask(prefix, attention.DeepseekV4Attention, is_kv_source=True, kv_cache_dtype="fp8_ds_mla",
            kv_cache_torch_dtype=torch.uint8, compress_ratio=ratio, kv_bytes_per_token=584, **_RECORD, **cached)  # fmt: skip
        if layer in shape["index_sources"]:
            ask(f"{prefix}.indexer.k_cache", attention.DeepseekV4IndexerCache, compress_ratio=ratio,
                sparse_logits=False, rocm_mxfp4=False, **{**cached, "head_dim": shape["index_dim"] + 4})  # fmt: skip
        if ratio > 1:
            ring = compressor.CompressorStateCache
            ask(f"{prefix}.compressor.state_cache", ring, state_dim=2 * shape["head_dim"], dtype=torch.float32,
                block_size=request["ring_rows"])  # fmt: skip
    return found


if __name__ == "__main__":
    raise SystemExit(main())
