"""Ling 3.0 (Flash): Kimi Delta Attention in five layers of six, latent attention gated by head in the sixth."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.families.kimi_linear import KimiLayers, read_mixture, with_deepseek_keys
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None, correction_bias="gate.expert_bias")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        with_deepseek_keys(raw),
        n_routed_experts=512,
        moe_intermediate_size=768,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        max_position_embeddings=262144,
        rope_theta=6000000.0,
        head_dim=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    hf_config.require(raw, attention_bias=False, q_lora_rank=None, tie_word_embeddings=False)
    # transformers writes the sizes of its linear layers under names of their own, and another head_dim.
    head_dim = raw.integer("linear_head_dim", raw.integer("head_dim", high=1 << 10), high=1 << 10)
    taps = raw.integer("linear_conv_kernel_dim", raw.integer("short_conv_kernel_size", 4), low=2, high=64)
    period = raw.integer("layer_group_size", 6)
    raw = with_latent_head(raw)
    fields = hf_config.common(raw, handled=EXPERT_KEYS, activations=hf_config.SILU)
    recurrent = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period), "linear_attention")
    mixture = read_mixture(raw, fields["layers"], _NAMES, first_dense=2)
    return ModelConfig(
        **fields,
        interleaved=True,
        stored_prefixes=(("model.word_embeddings.", "model.embed_tokens."),),
        build_layer=KimiLayers(
            recurrent,
            raw.integer("linear_num_heads", fields["heads"], high=1 << 16),
            head_dim,
            taps,
            read_latent(raw, mixture=mixture, base=glm4_moe.layer, block="attention", out="dense", gate="g_proj"),
            low_rank=False,
            floor=-_lower_bound(raw) if raw.boolean("kda_safe_gate", True) else 0.0,
        ),
    )


def _lower_bound(raw: Fields) -> float:
    bound = raw.values.get("kda_lower_bound", -5.0)
    return Fields({"-kda_lower_bound": -bound if isinstance(bound, (int, float)) else bound}, raw.source).number(
        "-kda_lower_bound", low=1e-3, high=80.0
    )
