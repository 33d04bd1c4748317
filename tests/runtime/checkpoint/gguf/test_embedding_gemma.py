"""Test GGUF files of EmbeddingGemma, as llama.cpp's and Ollama's converters write them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.layers.bidirectional import encode_texts
from mycli.runtime.utils.json_fields import Fields
from tests.support import gguf_files
from tests.support.embedding_models import embedding_gemma
from tests.support.models import CPU
from tests.support.paths import PICO

EXACT = replace(CPU, dtype=torch.float32)


def test_embedding_gemma_has_the_vectors_of_its_folder(tmp_path: Path) -> None:
    """Ollama's converter has other names for the same tensors, and says that attention is not causal."""
    folder = embedding_gemma(tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (tmp_path / "named").mkdir()
    save_file(weights, tmp_path / "named" / "model.safetensors")
    dense = [
        load_file(folder / path / "model.safetensors")["linear.weight"].tolist() for path in ("2_Dense", "3_Dense")
    ]
    keys: dict[str, Any] = {**gguf_files.published_tokenizer(PICO, "smollm"), "gemma-embedding.pooling_type": 1}
    keys["gemma-embedding.attention.sliding_window"] = config["sliding_window"]
    path = tmp_path / "a.gguf"
    extra = {f"dense_{index}.weight": matrix for index, matrix in enumerate(dense, 2)}
    rope = {"rope_parameters": {"full_attention": config["rope_parameters"]["full_attention"]}}
    gguf_files.write_model(tmp_path / "named", path, "gemma-embedding", "F32", {**config, **rope}, keys, extra)
    tokens = torch.randint(3, 4096, (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def vector(opened: ModelFolder) -> Tensor:
        runner = load_model(opened, EXACT)
        assert opened.embedding is not None
        states = encode_texts(runner.model, [tokens], runner.rope(len(tokens)))[0]
        return Embedder(opened.embedding, opened.config.hidden_size).vector(states)

    expected = vector(open_model_folder(folder))
    torch.testing.assert_close(vector(open_model_folder(path)), expected, rtol=1e-4, atol=1e-5)
    ollamas = {
        "dense_2.weight": "dense.0.weight",
        "dense_3.weight": "dense.1.weight",
        "output_norm.weight": "norm.weight",
    }
    opened = GgufFiles.open(path)
    names = {name: ollamas.get(name, name) for name in opened.header.tensors}
    values = {key.replace("gemma-embedding.", "gemma3."): value for key, value in opened.header.metadata.values.items()}
    values |= {"general.architecture": "gemma3", "gemma3.attention.causal": False}
    header = replace(
        opened.header,
        metadata=Fields(values, "a.gguf"),
        tensors={names[name]: replace(entry, name=names[name]) for name, entry in opened.header.tensors.items()},
    )
    ollama = GgufFolder.from_header(header, opened.floats, path, opened.files)
    torch.testing.assert_close(vector(ollama), expected, rtol=1e-4, atol=1e-5)
