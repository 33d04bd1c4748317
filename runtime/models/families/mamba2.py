"""Mamba-2 (Codestral Mamba 7B): a state space mixer in every layer, without attention and MLPs."""

from dataclasses import dataclass

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_plain_mamba
from mycli.runtime.utils.json_fields import Fields

# A recurrent state has no longest context. transformers names none either; llama.cpp takes this one.
_CONTEXT = 1 << 20


@dataclass(frozen=True)
class Mamba2Layers:
    mamba: MambaLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        return LayerSpec(index, self.mamba.mixer(config, index, "mixer"), None)


def read(raw: Fields) -> ModelConfig:
    values = {key: value for key, value in raw.values.items() if key not in ("layer_types", "num_heads", "head_dim")}
    mamba = read_plain_mamba(
        hf_config.with_defaults(
            raw,
            mamba_num_heads=raw.integer("num_heads", 128, high=1 << 16),
            ssm_state_size=raw.integer("state_size", 128),
        ),
        head_key="head_dim",
    )
    inner = raw.integer("expand", 2, high=64) * raw.integer("hidden_size")
    if mamba.heads * mamba.head_dim != inner:
        raise raw.fail("num_heads", f"= {mamba.heads} times head_dim {mamba.head_dim} must be {inner}")
    # `common` requires fields of attention and MLPs. The model has neither, so their values are never used.
    fields = hf_config.common(
        Fields(
            {
                "rms_norm_eps": raw.number("layer_norm_epsilon", 1e-5, low=1e-30, high=1.0),
                "max_position_embeddings": _CONTEXT,
                **values,
                "num_attention_heads": 1,
                "head_dim": 64,
                "intermediate_size": inner,
            },
            raw.source,
        )
    )
    return ModelConfig(
        **fields,
        layer_ropes=(None,) * fields["layers"],
        final_norm="model.norm_f",
        stored_prefixes=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        build_layer=Mamba2Layers(mamba),
    )
