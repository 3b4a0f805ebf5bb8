"""The model's folder, against the rules of the checkpoint's own layout."""

from __future__ import annotations

import json

import pytest

from deepinfer_cli.validate.e2e import model


def test_the_folder_is_what_the_options_say(tmp_path):
    model.write(tmp_path / "with", model.ModelOptions(engram=True, draft=True, positions=300_000))
    text = json.loads((tmp_path / "with" / "config.json").read_text())["text_config"]
    assert text["engram_layer_ids"] == [1, 3]
    assert text["num_nextn_predict_layers"] == 1
    assert text["max_position_embeddings"] == 300_000
    assert (tmp_path / "with" / "tokenizer.json").is_file()
    model.write(tmp_path / "without", model.ModelOptions(engram=False))
    text = json.loads((tmp_path / "without" / "config.json").read_text())["text_config"]
    assert text["engram_layer_ids"] == text["engram_num_embeddings"] == []
    assert text["num_nextn_predict_layers"] == 0
    assert [path.name for path in (tmp_path / "without").iterdir()] == ["config.json"]


def test_every_layer_has_its_sources():
    assert len(model.RATIOS) == 8
    for source in model.KV_SOURCES:
        assert source in model.INDEX_SOURCES and model.RATIOS[source] > 0
    for source in model.INDEX_SOURCES:
        owner = max(one for one in model.KV_SOURCES if one <= source)
        assert model.RATIOS[owner] == model.RATIOS[source]
    assert model.RATIOS[: model.KV_SOURCES[0]] == (0,) * model.KV_SOURCES[0]
    assert any(source > model.CANDIDATE_SOURCE for source in model.INDEX_SOURCES)
    # vLLM replays the decoder behind the last KV source only without Engram there
    assert max(model.ENGRAM_LAYERS) < max(model.KV_SOURCES)


def test_half_of_the_tokens_are_hashed_alike():
    words = model.tokenizer()["model"]["vocab"]
    assert sorted(words.values()) == list(range(model.VOCAB))
    assert (
        len({word.lower() for word in words})
        == model.config(model.ModelOptions())["text_config"]["engram_compressed_vocab_size"]
    )


def test_table_rows_are_sums_of_primes_that_are_used_once():
    assert [model.engram_rows(index) for index in range(2)] == [50_148, 54_840]


@pytest.mark.parametrize("options", [{}, {"draft": True}, {"engram": False}])
def test_weights_take_about_what_is_said(options):
    chosen = model.ModelOptions(**options)
    assert 6e9 < model.weight_bytes(chosen) < 8e9
    assert model.weight_bytes(model.ModelOptions(draft=True)) > model.weight_bytes(model.ModelOptions())
