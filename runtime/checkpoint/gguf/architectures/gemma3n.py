"""Gemma 3n, its text model: four residual streams, LAuReL, per-layer inputs, and sparse MLPs in the first layers."""

import math
from array import array
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import PER_LAYER_VOCAB, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, PER_LAYER_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import StreamsSpec

# llama.cpp has no keys for these.
_STREAMS, _LAUREL_RANK, _PER_LAYER_WIDTH, _SPARSE_LAYERS, _SPARSITY, _KV_LAYERS = 4, 64, 256, 10, 0.95, 20


def _stacked(name: str) -> TensorRule:
    # One matrix for each stream but the active one, stacked in the file.
    others = tuple(f"{name}.{index}" for index in range(1, _STREAMS - 1))
    shape = (_STREAMS - 1,)
    return TensorRule(
        f"{name}.0",
        more_names=others,
        stored_shape=lambda config: (*shape, config.hidden_size, config.hidden_size),
    )


def _share(deviations: float) -> float:
    # The share of a normal distribution below a number of deviations, which the file has in its place.
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))


def _deviations(share: float) -> float:
    # Bisection instead of torch's inverse of the error function, which reading a header must not load.
    if share <= 0:
        return -math.inf
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _share(middle) < share else (low, middle)
    return low


def _sparsities(model: GgufModel, layers: int) -> list[float]:
    key = model.key("activation_sparsity_scale")
    values = model.metadata.values.get(key)
    if not isinstance(values, array) or len(values) != layers:
        raise model.metadata.fail(key, "is not a list with one number for each layer")
    return [_share(float(value)) for value in values]


def _read_config(model: GgufModel, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    fields: Config = {
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": model.layer_values("feed_forward_length"),
        "num_kv_shared_layers": model.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": model.integer("embedding_length_per_layer_input", low=1),
        "altup_num_inputs": model.integer("altup.num_inputs", low=2),
        "altup_active_idx": model.integer("altup.active_idx", 0),
        "activation_sparsity_pattern": _sparsities(model, layers),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }
    if len(fields["intermediate_size"]) == 1:
        fields["intermediate_size"] *= layers
    for name, tensor in (("laurel_rank", "blk.0.laurel_l"), ("vocab_size_per_layer_input", "per_layer_token_embd")):
        entry = model.tensors.get(f"{tensor}.weight")
        if entry is not None:
            fields[name] = entry.shape[0]
    return fields


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    attentions, sizes = [layer.attention for layer in config.layer_specs], [s.dense_mlp for s in config.layer_specs]
    sliding = next((attention.rope for attention in attentions if attention.window is not None), None)
    return {
        "rope.freq_base_swa": float(config.rope_theta if sliding is None else sliding.theta),
        "feed_forward_length": [mlp.size for mlp in sizes],
        "attention.shared_kv_layers": sum(attention.kv_source is not None for attention in attentions),
        "embedding_length_per_layer_input": config.per_layer_width,
        "altup.num_inputs": config.streams,
        "altup.active_idx": _streams(config).active,
        "activation_sparsity_scale": [_deviations(mlp.sparsity) for mlp in sizes],
        "final_logit_softcapping": float(config.logit_softcap or 0.0),
    }


def _streams(config: ModelConfig) -> StreamsSpec:
    streams = config.layer_specs[0].streams
    assert streams is not None
    return streams


def _rank(config: ModelConfig) -> int:
    laurel = config.layer_specs[0].laurel
    return 0 if laurel is None else laurel.left.out_features


def _sparse_first(config: ModelConfig) -> bool:
    shares = [layer.dense_mlp.sparsity for layer in config.layer_specs]
    expected = [_SPARSITY if index < _SPARSE_LAYERS else 0.0 for index in range(config.layers)]
    return all(math.isclose(ours, theirs, abs_tol=1e-6) for ours, theirs in zip(shares, expected, strict=True))


def _computes_kv_first(config: ModelConfig) -> bool:
    return all((layer.attention.kv_source is None) == (layer.index < _KV_LAYERS) for layer in config.layer_specs)


def _unread(config: ModelConfig) -> dict[str, str]:
    # Layers that read the keys and values of another.
    sharing = [layer.index for layer in config.layer_specs if layer.attention.kv_source is not None]
    names = [f"{part}.weight" for part in ("attn_k", "attn_v", "attn_k_norm")]
    return {f"blk.{index}.{name}": f"blk.0.{name}" for index in sharing for name in names}


ARCHITECTURE = Architecture(
    name="gemma3n",
    model_type="gemma3n_text",
    written_types=("gemma3n_text",),
    biases=(),
    requires=(
        Requirement(
            f"{_STREAMS} residual streams, the first one active and its correction scaled",
            lambda config: (
                (_streams(config).count, _streams(config).active, _streams(config).scales) == (_STREAMS, 0, True)
            ),
        ),
        Requirement(f"laurel_rank = {_LAUREL_RANK}", lambda config: _rank(config) == _LAUREL_RANK),
        Requirement(
            f"hidden_size_per_layer_input = {_PER_LAYER_WIDTH}",
            lambda config: config.per_layer_width == _PER_LAYER_WIDTH,
        ),
        PER_LAYER_VOCAB,
        Requirement(f"{_SPARSITY} of the gates zero in the first {_SPARSE_LAYERS} layers", _sparse_first),
        Requirement(f"keys and values of their own in the first {_KV_LAYERS} layers alone", _computes_kv_first),
    ),
    layer_tensors={
        **LLAMA_TENSORS,
        "post_attention_norm": TensorRule("post_attention_layernorm"),
        "ffn_norm": TensorRule("pre_feedforward_layernorm"),
        "post_ffw_norm": TensorRule("post_feedforward_layernorm"),
        "inp_gate": TensorRule("per_layer_input_gate"),
        "proj": TensorRule("per_layer_projection"),
        "post_norm": TensorRule("post_per_layer_input_norm"),
        "altup_router": TensorRule("altup.modality_router"),
        "altup_router_norm": TensorRule("altup.router_norm"),
        "altup_predict_coef": TensorRule("altup.prediction_coefs"),
        "altup_correct_coef": TensorRule("altup.correction_coefs"),
        "altup_correct_scale": TensorRule("altup.correct_output_scale", suffixes={".weight": ""}),
        "laurel_l": TensorRule("laurel.linear_left"),
        "laurel_r": TensorRule("laurel.linear_right"),
        "laurel_post_norm": TensorRule("laurel.post_laurel_norm"),
    },
    model_tensors={
        **MODEL_TENSORS,
        **PER_LAYER_TENSORS,
        "altup_proj": _stacked("model.altup_projections"),
        "altup_unembd_proj": _stacked("model.altup_unembed_projections"),
    },
    keys=(WINDOW_KEY,),
    unread=_unread,
    slides=lambda layer: (layer + 1) % 5 != 0,
    pattern=True,
    by_layer=("feed_forward_length",),
    read_config=_read_config,
    write_keys=_write_keys,
)
