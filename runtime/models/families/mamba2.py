"""Mamba-2 (Codestral Mamba 7B): a state space mixer in every layer, without attention and MLPs."""

from dataclasses import dataclass

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_plain_mamba, without_attention
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class Mamba2Layers:
    mamba: MambaLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        return LayerSpec(index, self.mamba.mixer(config, index, "mixer"), None)


def read(raw: Fields) -> ModelConfig:
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
    return without_attention(raw, inner, Mamba2Layers(mamba))
