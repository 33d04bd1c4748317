"""Bamba, which llama.cpp has as granitehybrid: a plain MLP, and attention that rotates a part of each head."""

from collections.abc import Iterable

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.granite import FINETUNED
from mycli.runtime.checkpoint.gguf.architectures.granitehybrid import SHARED_LENGTH
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    EXPANSION_OF_TWO,
    mamba_tensors,
    read_hybrid_fields,
    write_granitehybrid_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, RowRanges, TensorRule
from mycli.runtime.models.config import ModelConfig

_SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def _paired(heads: int, config: ModelConfig) -> Iterable[range]:
    # Pairs of the rows that rotate, then the others. llama.cpp's converter pairs the rows of whole heads, but llama.cpp
    # rotates neighbours of the first `rotary` rows.
    rotary = config.rotary_dim or config.head_dim
    for start in range(0, heads * config.head_dim, config.head_dim):
        yield from (range(start + pair, start + rotary, rotary // 2) for pair in range(rotary // 2))
        yield range(start + rotary, start + config.head_dim)


def _read_config(model: GgufModel, config: Config) -> Config:
    for name in _SCALES:
        if model.number(name, 0.0):
            raise model.metadata.fail(model.key(name), "is not supported without a shared MLP")
    if not model.boolean(FINETUNED, True):
        raise model.metadata.fail(model.key(FINETUNED), "= false is not supported without a shared MLP")
    heads = model.layer_values("attention.head_count_kv", config["num_hidden_layers"])
    return {
        **linear_biases(model, config),
        **read_hybrid_fields(model),
        "attn_layer_indices": [index for index, count in enumerate(heads) if count],
    }


ARCHITECTURE = Architecture(
    name="granitehybrid",
    model_type="bamba",
    written_types=("bamba",),
    reads=lambda header, experts: not experts and not header.metadata.has(f"granitehybrid.{SHARED_LENGTH}"),
    requires=(CONVOLUTION_BIAS, EXPANSION_OF_TWO),
    biases=(*ALL_BIASES, "ssm_conv1d"),
    layer_tensors={
        **LLAMA_TENSORS,
        **mamba_tensors("mamba"),
        "attn_q": TensorRule("self_attn.q_proj", RowRanges(lambda config: _paired(config.heads, config))),
        "attn_k": TensorRule("self_attn.k_proj", RowRanges(lambda config: _paired(config.kv_heads, config))),
        "ffn_norm": TensorRule("pre_ff_layernorm"),
        **{f"ffn_{part}": TensorRule(f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.final_layernorm")},
    by_layer=("attention.head_count_kv",),
    read_config=_read_config,
    write_keys=write_granitehybrid_keys,
)
