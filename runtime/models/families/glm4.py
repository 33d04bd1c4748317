"""GLM-4-0414: norms before and after each part, biases on q, k and v, gate and up in one tensor."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    gate_up = LinearSpec(f"{prefix}.mlp.gate_up_proj", 2 * config.intermediate_size, config.hidden_size)
    after_attention = config.norm_spec(f"{prefix}.post_self_attn_layernorm")
    after_mlp = config.norm_spec(f"{prefix}.post_mlp_layernorm")
    return LayerSpec(
        index,
        replace(llama.attention, output_norm=after_attention),
        replace(llama.dense_mlp, gate_up=(gate_up,), output_norm=after_mlp),
        ignored_prefixes=(f"model.layers.{config.layers}.",),  # the MTP head of GLM-OCR
    )


def read(raw: Fields) -> ModelConfig:
    end_tokens = [151329, 151336, 151338]
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-07, eos_token_id=end_tokens
    )
    fields = hf_config.common(raw, handled=("partial_rotary_factor",))
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("attention_bias", True),
        # Half of each head rotates, in interleaved pairs.
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        interleaved=True,
        build_layer=layer,
    )
