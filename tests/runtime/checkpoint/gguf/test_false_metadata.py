"""Test GGUF files whose fields contradict the model: each is an error that names the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from tests.support import gguf_files
from tests.support.paths import PICO

# In addition to those of tests/attacks/gguf_model_attacks.py.
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "other-architecture": ({"general.architecture": "rwkv7"}, "general.architecture"),
    "too-many-layers": ({"llama.block_count": 5000}, "block_count"),
    "one-layer-more": ({"llama.block_count": 7}, "missing"),
    "one-layer-less": ({"llama.block_count": 5}, "not part of the model"),
    "mtp-head-of-llama": ({"llama.block_count": 5, "llama.nextn_predict_layers": 1}, "not part of the model"),
    "heads-that-do-not-divide": ({"llama.attention.head_count_kv": 3}, "divide"),
    "other-width": ({"llama.embedding_length": 512}, "shape"),
    "huge-width": ({"llama.embedding_length": 1 << 31, "llama.feed_forward_length": 1 << 31}, "elements"),
    "head-dim-odd": ({"llama.attention.key_length": 63, "llama.attention.value_length": 63}, "odd"),
    "values-of-another-size": ({"llama.attention.value_length": 32}, "value_length"),
    "epsilon-nan": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    "theta-infinite": ({"llama.rope.freq_base": float("inf")}, "freq_base"),
    "partial-rotation": ({"llama.rope.dimension_count": 32}, "partial_rotary_factor"),
    "unknown-scaling": ({"llama.rope.scaling.type": "magic"}, "magic"),
    "experts": ({"llama.expert_count": 8}, "expert_used_count"),
    "every-token-sees-all": ({"llama.attention.causal": False}, "attention.causal"),
    "context-0": ({"llama.context_length": 0}, "context_length"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_an_error(name: str, tmp_path: Path) -> None:
    changes, message = LIES[name]
    config = json.loads((PICO / "config.json").read_text())
    path = tmp_path / "a.gguf"
    gguf_files.write_model(PICO, path, "llama", "BF16", config, {**gguf_files.byte_tokenizer(4096), **changes})
    with pytest.raises(ModelError, match=message):
        open_model_folder(path).checked_manifest()


TOKENIZER_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "other-kind": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model"),
    "unknown-rule": ({"tokenizer.ggml.pre": "my-own"}, "tokenizer.ggml.pre"),
    "no-tokens": ({"tokenizer.ggml.tokens": None}, "tokens"),
    "token-twice": ({"tokenizer.ggml.tokens": ["a"] * 300}, "twice"),
    "merge-of-no-tokens": ({"tokenizer.ggml.merges": ["zzzz yyyy"]}, "merges"),
    "template-is-a-number": ({"tokenizer.chat_template": 7}, "chat_template"),
}


@pytest.mark.parametrize("name", TOKENIZER_LIES)
def test_a_vocabulary_that_lies_is_an_error(name: str, tmp_path: Path) -> None:
    changes, message = TOKENIZER_LIES[name]
    config = json.loads((PICO / "config.json").read_text())
    keys = {key: value for key, value in {**gguf_files.byte_tokenizer(4096), **changes}.items() if value is not None}
    path = tmp_path / "a.gguf"
    gguf_files.write_model(PICO, path, "llama", "BF16", config, keys)
    with pytest.raises(ModelError, match=message):
        open_model_folder(path).tokenizer()
