"""Test how the modules of a sentence-transformers folder are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.model_folder import COMPANIONS
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.sentence_transformers import (
    EmbeddingSpec,
    ScoreSpec,
    lowers_texts,
    read_embedding_spec,
    read_score_spec,
)
from mycli.runtime.errors import ModelError
from tests.support.paths import PICO

TYPES = "sentence_transformers.models."


def _read(folder: Path, dense: dict[str, Any], **pooling: Any) -> EmbeddingSpec:
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    (folder / "modules.json").write_text(json.dumps([{"type": TYPES + kind, "path": path} for kind, path in modules]))
    for name, values in (("1_Pooling", pooling or {"pooling_mode": "mean"}), ("2_Dense", dense)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    spec = read_embedding_spec(folder, 8)
    assert spec is not None
    return spec


def test_a_dense_layer_has_a_bias_and_tanh_unless_it_says_otherwise(tmp_path: Path) -> None:
    (layer,) = _read(tmp_path, {"in_features": 8, "out_features": 1 << 20}).dense
    assert (layer.in_features, layer.out_features, layer.bias, layer.activation) == (8, 1 << 20, True, "Tanh")


@pytest.mark.parametrize("features", [0, (1 << 20) + 1])
def test_a_dense_layer_of_no_or_too_many_values_is_refused(tmp_path: Path, features: int) -> None:
    with pytest.raises(ModelError, match="out_features"):
        _read(tmp_path, {"in_features": 8, "out_features": features})


def test_vectors_of_several_modes_are_joined(tmp_path: Path) -> None:
    modes = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    spec = _read(tmp_path, {"in_features": 16, "out_features": 4, "bias": False}, **modes)
    assert spec.pooling == ("mean", "last") and spec.needs_all and spec.size(8) == 4


@pytest.mark.parametrize("false", [2152, None])
def test_a_reranker_keeps_its_head_and_has_no_vectors(tmp_path: Path, false: int | None) -> None:
    """As Qwen3-Reranker is published: its 8B model has a head of its own."""
    kinds = (
        ("base.modules.transformer.Transformer", ""),
        ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),
    )
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in kinds]))
    (tmp_path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 9693, "false_token_id": false}
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    config = json.loads((PICO / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_embedding_spec(tmp_path, 8) is None and read_score_spec(tmp_path) == ScoreSpec(9693, false)
    folder = open_model_folder(tmp_path)
    assert folder.embedding is None and not folder.config.tie_embeddings


def test_a_pooling_mode_has_the_name_of_its_library(tmp_path: Path) -> None:
    modes = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    spec = _read(tmp_path, {"in_features": 48, "out_features": 4}, pooling_mode=modes)
    assert spec.pooling == ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_residual", True), ("module_input_name", "token_embeddings"), ("module_output_name", "scores")],
)
def test_a_dense_layer_that_computes_something_else_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{key} = .* is not supported"):
        _read(tmp_path, {"in_features": 8, "out_features": 8, key: value})


def test_texts_within_a_chat_template_are_refused(tmp_path: Path) -> None:
    """As of Qwen3-VL-Embedding."""
    dense = {"in_features": 8, "out_features": 8}
    config = tmp_path / "sentence_bert_config.json"
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    config.write_text(json.dumps({"max_seq_length": 512, "modality_config": {"text": text}}))
    _read(tmp_path, dense)
    config.write_text(json.dumps({"modality_config": {"text": text, "message": {**text, "format": "structured"}}}))
    with pytest.raises(ModelError, match=r"sentence_bert_config\.json: modality_config has 'message'"):
        read_embedding_spec(tmp_path, 8)


@pytest.mark.parametrize(
    ("kinds", "place"),
    [
        (("StaticEmbedding", "Pooling"), 0),
        (("Transformer", "Pooling", "Transformer"), 2),
        (("Transformer", "LSTM", "Pooling"), 1),
        (("Transformer", "Pooling", "Normalize", "Dense"), 2),
    ],
)
def test_other_modules_and_orders_are_refused(kinds: tuple[str, ...], place: int, tmp_path: Path) -> None:
    """A skipped module would change every vector."""
    modules = [{"type": TYPES + kind, "path": f"{index}_{kind}"} for index, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    with pytest.raises(ModelError, match=f"module '{kinds[place]}' is not supported in place {place}"):
        read_embedding_spec(tmp_path, 8)


@pytest.mark.parametrize("path", ["..", ".", "", "../1_Pooling", "/etc", ".hidden", "a/b"])
def test_a_module_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    modules = [("Transformer", ""), ("Pooling", path)]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": TYPES + kind, "path": name} for kind, name in modules]))
    with pytest.raises(ModelError, match="is not a folder of the model"):
        read_embedding_spec(tmp_path, 8)


@pytest.mark.parametrize("name", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_older_names_of_the_settings(name: str, tmp_path: Path) -> None:
    """The library reads the first that exists; the name of BERT comes first."""
    _read(tmp_path, {"in_features": 8, "out_features": 8})
    (tmp_path / f"sentence_{name}_config.json").write_text(json.dumps({"max_seq_length": 96, "do_lower_case": True}))
    spec = read_embedding_spec(tmp_path, 8)
    assert spec is not None and spec.max_tokens == 96 and lowers_texts(tmp_path)
    assert f"sentence_{name}_config.json" in COMPANIONS
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    spec = read_embedding_spec(tmp_path, 8)
    assert spec is not None and spec.max_tokens == 64 and not lowers_texts(tmp_path)


@pytest.mark.parametrize("part", ["in-process", "worker", "already-lower"])
def test_texts_in_lower_case(part: str, tmp_path: Path) -> None:
    """The library puts a step before the tokenizer's own, whose vocabulary has capitals too."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, tmp_path)
    tokenizer = json.loads((PICO / "tokenizer.json").read_text())
    if part == "worker":
        regex = {"type": "Replace", "pattern": {"Regex": "\\r"}, "content": " "}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [regex]}
    elif part == "already-lower":
        tokenizer["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    lower = open_model_folder(tmp_path).tokenizer().encode("hello there", add_special=True)
    for setting in (False, True):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": setting}))
        found = open_model_folder(tmp_path).tokenizer().encode("Hello There", add_special=True)
        assert (found == lower) == (setting or part == "already-lower")
