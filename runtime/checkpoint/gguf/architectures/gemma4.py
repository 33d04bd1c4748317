"""Gemma 4, its text model: per-layer inputs, keys and values of other layers, heads and widths that differ by layer."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import PER_LAYER_VOCAB, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, PER_LAYER_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec

_TENSORS = {
    **LLAMA_TENSORS,
    "post_attention_norm": TensorRule("post_attention_layernorm"),
    "ffn_norm": TensorRule("pre_feedforward_layernorm"),
    "post_ffw_norm": TensorRule("post_feedforward_layernorm"),
    "post_ffw_norm_1": TensorRule("post_feedforward_layernorm_1"),
    "pre_ffw_norm_2": TensorRule("pre_feedforward_layernorm_2"),
    "post_ffw_norm_2": TensorRule("post_feedforward_layernorm_2"),
    "inp_gate": TensorRule("per_layer_input_gate"),
    "proj": TensorRule("per_layer_projection"),
    "post_norm": TensorRule("post_per_layer_input_norm"),
    "layer_output_scale": TensorRule("layer_scalar", suffixes={".weight": ""}),
    "ffn_gate_inp": TensorRule("router", suffixes={".weight": ".proj.weight", ".scale": ".scale"}),
    "ffn_gate_exps": TensorRule("experts.{expert}.gate_proj"),
    "ffn_up_exps": TensorRule("experts.{expert}.up_proj"),
    "ffn_gate_up_exps": TensorRule("experts.{expert}.gate_proj", more_names=("experts.{expert}.up_proj",)),
    "ffn_down_exps": TensorRule("experts.{expert}.down_proj"),
    "ffn_down_exps.scale": TensorRule("router.per_expert_scale", suffixes={"": ""}),
}


def _read_config(model: GgufModel, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    slides = [bool(value) for value in model.layer_values("attention.sliding_window_pattern", layers)]
    full = slides.index(False) if False in slides else layers - 1
    fields: Config = {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "head_dim": model.integer("attention.key_length_swa", low=1),
        "global_head_dim": config["head_dim"],
        "num_kv_shared_layers": model.integer("attention.shared_kv_layers", 0),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in model.tensors,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": model.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)},
        },
    }
    widths = model.layer_values("feed_forward_length")
    fields |= {"intermediate_size": widths[0], "use_double_wide_mlp": len(set(widths)) > 1}
    heads = model.layer_values("attention.head_count_kv")
    if len(heads) == layers:
        fields["num_key_value_heads"] = heads[slides.index(True)] if True in slides else heads[full]
        fields["num_global_key_value_heads"] = heads[full]
    table = model.tensors.get("per_layer_token_embd.weight")
    if table is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    if model.integer("expert_count", 0):
        fields |= {
            "enable_moe_block": True,
            "top_k_experts": model.integer("expert_used_count", low=1),
            "moe_intermediate_size": model.integer("expert_feed_forward_length", low=1),
        }
    return fields


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    attentions, mixtures = [layer.attention for layer in config.layer_specs], config.layer_specs[0].mlp
    full = next(attention for attention in attentions if attention.window is None)
    sliding = next((attention for attention in attentions if attention.window is not None), full)
    assert sliding.rope is not None
    mlps = [
        layer.mlp.shared.mlp if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.shared else layer.dense_mlp
        for layer in config.layer_specs
    ]
    keys: dict[str, Any] = {
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.head_count_kv": [attention.kv_heads for attention in attentions],
        "attention.shared_kv_layers": sum(attention.kv_source is not None for attention in attentions),
        "attention.sliding_window_pattern": [attention.window is not None for attention in attentions],
        "feed_forward_length": [mlp.size for mlp in mlps],
        "embedding_length_per_layer_input": config.per_layer_width,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "rope.freq_base_swa": float(sliding.rope.theta),
    }
    if config.logit_softcap is not None:
        keys["final_logit_softcapping"] = float(config.logit_softcap)
    if isinstance(mixtures, ExpertsSpec):
        keys |= {
            "expert_count": len(mixtures.experts),
            "expert_used_count": mixtures.top_k,
            "expert_feed_forward_length": mixtures.size,
        }
    return keys


def _last_kv_windows(config: ModelConfig) -> list[bool]:
    # Whether each of the last two layers with keys and values of their own has a window; empty where all have some.
    attentions = [layer.attention for layer in config.layer_specs]
    windows = [attention.window is not None for attention in attentions if attention.kv_source is None]
    return windows[-2:] if len(windows) < len(attentions) else []


ARCHITECTURE = Architecture(
    name="gemma4",
    model_type="gemma4_text",
    written_types=("gemma4_text", "gemma4_unified_text"),
    requires=(
        PER_LAYER_VOCAB,
        Requirement(
            "full attention in the last layer that has keys and values of its own, sliding in the one before it",
            lambda config: _last_kv_windows(config) in ([], [True, False]),
        ),
    ),
    layer_tensors=_TENSORS,
    model_tensors={**MODEL_TENSORS, **PER_LAYER_TENSORS},
    keys=(WINDOW_KEY,),
    by_layer=("attention.head_count_kv", "feed_forward_length"),
    read_config=_read_config,
    write_keys=_write_keys,
)
