"""StableLM 3B and StableLM 2: Llama with LayerNorms, a quarter of each head rotated, and optional parallel parts."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import NormSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class StableLmLayers:
    """Builds the layers. head_norms: each head of q and k has a LayerNorm of its own, without bias."""

    parallel: bool
    head_norms: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}.self_attn"
        attention, mlp = llama.attention, llama.dense_mlp
        # In StableLM 2 12B; it has no kernel and runs head by head.
        if self.head_norms:
            norm = NormSpec(None, config.head_dim, config.rms_norm_eps, layer_norm=True)
            q_norm = replace(norm, name=f"{prefix}.q_layernorm.norms", heads=config.heads)
            k_norm = replace(norm, name=f"{prefix}.k_layernorm.norms", heads=config.kv_heads)
            attention = replace(attention, q_norm=q_norm, k_norm=k_norm)
        mlp = replace(mlp, norm=None) if self.parallel else mlp
        return replace(llama, mixer=attention, mlp=mlp, parallel=self.parallel)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "layer_norm_eps")
    fields = hf_config.common(raw, handled=("partial_rotary_factor",))
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("use_qkv_bias", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.25),
        layer_norm=True,
        norm_bias=True,
        build_layer=StableLmLayers(raw.boolean("use_parallel_residual", False), raw.boolean("qk_layernorm", False)),
    )
