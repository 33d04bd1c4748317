"""Converts model folders to GGUF files and back, for measuring llama.cpp's programs (`tests.benchmarks.llama`).

Supports only Llama without biases or scaled rotary embeddings. llama.cpp rotates neighbouring pairs of a head's rows,
transformers rows half a head apart, so the rows of q and k are permuted in both directions.

The vocabulary has one character per token (code points from `TOKEN` on), so that `as_text` passes token ids exactly:
text of a real vocabulary that begins in the middle of a word, or random tokens, would be tokenized differently when
read again. The files are for measuring, not for generating text.

Needs gguf (`pip install gguf`), which writes, reads and dequantizes.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.validation import check_tensors
from mycli.runtime.models.config import ModelConfig

TOKEN = 0x10000  # the character of token 0: above all surrogates and all spaces
_ARCH = gguf.MODEL_ARCH.LLAMA


def as_text(ids: Iterable[int]) -> str:
    """Return the text that llama.cpp tokenizes to exactly `ids` with the vocabulary that `write` stores."""
    return "".join(chr(TOKEN + index) for index in ids)


def write(folder: Path, target: Path) -> None:
    """Write the model of `folder` to `target` with every tensor in fp32.

    Raises ValueError for a model that is not a plain Llama.
    """
    opened = open_model_folder(folder)
    config, packings = opened.config, opened.packings
    manifest = Manifest.open(folder)
    check_tensors(manifest, config, packings)
    if (
        config.model_type != "llama"
        or config.rope_scaling.kind != "default"
        or packings
        or config.qkv_bias
        or config.mlp_bias
    ):
        raise ValueError(f"{folder}: not a plain Llama")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[_ARCH])
    _describe(writer, config)
    checkpoint = Checkpoint(manifest)
    for name, _ in config.tensors():
        tensor, heads = checkpoint.read(name).float(), _heads(name, config)
        writer.add_tensor(_theirs(name, config), (_pairs(tensor, heads) if heads else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(source: Path, original: Path, target: Path) -> None:
    """Write the values of the GGUF `source`, quantized or not, as an unquantized fp32 model folder at `target`.

    The config and the tokenizer are taken from `original`. Raises KeyError for a missing tensor.
    """
    config = open_model_folder(original).config
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    state: dict[str, Tensor] = {}
    for name, shape in config.tensors():
        tensor, heads = found[_theirs(name, config)], _heads(name, config)
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)).reshape(shape)
        state[name] = _halves(values, heads) if heads else values
    shutil.copytree(original, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    raw = json.loads((original / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "dtype": "float32"}))
    save_file(state, target / "model.safetensors")


def linears(source: Path, original: Path) -> tuple[float, Counter[str]]:
    """Return the bits per weight of the linears of the blocks, and the number of linears of each type."""
    config = open_model_folder(original).config
    blocks = (config.layer(layer).products() for layer in range(config.layers))
    specs = (spec for block in blocks for group in block.values() for spec in group)
    names = {_theirs(f"{spec.name}.weight", config) for spec in specs}
    found = [tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name in names]
    assert len(found) == len(names), source
    nbytes, weights = sum(int(tensor.n_bytes) for tensor in found), sum(int(tensor.n_elements) for tensor in found)
    return 8 * nbytes / weights, Counter(tensor.tensor_type.name for tensor in found)


def _theirs(name: str, config: ModelConfig) -> str:
    found = gguf.get_tensor_name_map(_ARCH, config.layers).get_name(name, try_suffixes=(".weight",))
    assert found is not None, name
    return found


def _heads(name: str, config: ModelConfig) -> int | None:
    """Return the number of heads in the rows of `name` if rotary embeddings apply to it, else None."""
    return {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])


def _pairs(tensor: Tensor, heads: int) -> Tensor:
    """Permute rows [heads x (half, pair)] to [heads x (pair, half)], so that rows rotated together are adjacent."""
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _halves(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _describe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write the sizes and a vocabulary of one character per token, without a BOS token."""
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([as_text([index]) for index in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
