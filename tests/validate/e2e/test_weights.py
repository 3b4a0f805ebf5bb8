"""The values that the small model is given."""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def weights(monkeypatch):
    """The module, with a stand-in for vLLM's rank."""
    rank = types.ModuleType("vllm.distributed")
    rank.number = 0
    rank.get_tensor_model_parallel_rank = lambda: rank.number
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", rank)
    from deepinfer_cli.validate.e2e import weights

    weights.rank = rank
    return weights


def parameter(shape, dtype):
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def build(sharded=False):
    """A module with one parameter of each kind, in vLLM's names."""
    model = torch.nn.Module()
    layer = model.layer = torch.nn.Module()
    layer.wq_b = torch.nn.Module()
    layer.wq_b.weight = parameter((64, 128), torch.float8_e4m3fn)
    layer.wq_b.weight_scale = parameter((64, 4), torch.uint8)
    layer.experts = torch.nn.Module()
    layer.experts.w13_weight = parameter((2, 16, 32), torch.uint8)
    layer.experts.w13_weight_scale = parameter((2, 16, 2), torch.uint8)
    layer.engram = torch.nn.Module()
    layer.engram.embed_tokens = torch.nn.Module()
    layer.engram.embed_tokens.weight = parameter((50, 64), torch.float8_e4m3fn)
    layer.engram.embed_tokens.weight_scale_inv = parameter((50, 2), torch.uint8)
    layer.attn_norm = torch.nn.Module()
    layer.attn_norm.weight = parameter((256,), torch.bfloat16)
    layer.attn_sink = parameter((64,), torch.float32)
    layer.hc_attn_scale = parameter((3,), torch.float32)
    layer.gate = torch.nn.Module()
    layer.gate.weight = parameter((16, 256), torch.bfloat16)
    layer.gate.e_score_correction_bias = parameter((16,), torch.float32)
    if sharded:
        layer.wq_b.tp_size = 2
    return model


def filled(weights, **more):
    model = build(**more)
    found = weights.fill(model, device="cpu")
    return dict(model.named_parameters()), {name: kind for name, _, _, kind in found}


def test_each_kind_gets_its_values(weights):
    values, kinds = filled(weights)
    assert kinds["layer.wq_b.weight"] == "e4m3"
    assert values["layer.wq_b.weight"].float().std() == pytest.approx(1.0, abs=0.1)
    assert set(values["layer.wq_b.weight_scale"].flatten().tolist()) == {120, 121, 122}
    assert set(values["layer.experts.w13_weight_scale"].flatten().tolist()) <= {118, 119, 120}
    assert kinds["layer.experts.w13_weight"] == "e2m1"
    assert len(values["layer.experts.w13_weight"].unique()) > 100
    assert set(values["layer.engram.embed_tokens.weight_scale_inv"].flatten().tolist()) == {126, 127, 128}
    assert values["layer.attn_norm.weight"].float().mean() == pytest.approx(1.0, abs=0.02)
    assert values["layer.attn_sink"].mean() == pytest.approx(5.0, abs=0.5)
    assert values["layer.hc_attn_scale"].tolist() == [1.0] * 3
    assert values["layer.gate.weight"].float().std() == pytest.approx(1 / 16, abs=0.01)
    assert kinds["layer.gate.e_score_correction_bias"] == "small"


def test_values_follow_from_the_name(weights):
    one, _ = filled(weights)
    two, _ = filled(weights)
    for name, value in one.items():
        assert torch.equal(value.view(torch.uint8), two[name].view(torch.uint8)), name
    codes = one["layer.wq_b.weight"].view(torch.uint8)
    assert not torch.equal(codes[:50, :64], one["layer.engram.embed_tokens.weight"].view(torch.uint8))


def test_a_table_that_is_filled_in_parts_is_whole(weights, monkeypatch):
    monkeypatch.setattr(weights, "_BYTES_AT_ONCE", 4 * 64 * 4)
    values, _ = filled(weights)
    codes = values["layer.engram.embed_tokens.weight"].float()
    assert all(row.std() > 0.5 for row in codes)
    assert len({tuple(row.tolist()) for row in codes}) == 50


def test_ranks_differ_where_vllm_shards_and_only_there(weights):
    one, _ = filled(weights, sharded=True)
    weights.rank.number = 1
    two, _ = filled(weights, sharded=True)
    different = {
        name for name in one if not torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8))
    }
    assert different == {"layer.wq_b.weight", "layer.wq_b.weight_scale"}


def test_a_meta_parameter_is_said_and_left(weights):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    assert weights.fill(model, device="cpu") == [["weight", [4, 4], "float32", "meta"]]
