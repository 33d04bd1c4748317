"""Baichuan 1 and 2, 7B: Llama with q, k and v in one tensor; the head of Baichuan 2 has rows of norm one.

The 13B models have attention biases by distance (ALiBi) and are refused.
"""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.json_fields import Fields

_ALIBI_SIZE = 5120


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, hidden = llama_layer(config, index), config.hidden_size
    qkv = LinearSpec(f"model.layers.{index}.self_attn.W_pack", 3 * hidden, hidden)
    return replace(llama, mixer=replace(llama.attention, qkv=(qkv,)))


def read(raw: Fields) -> ModelConfig:
    # Configs do not name the kind of positions, only the code of the repository does. Those with ALiBi lack
    # max_position_embeddings.
    if raw.integer("hidden_size") == _ALIBI_SIZE or not raw.has("max_position_embeddings"):
        message = "'baichuan' of 13B is not supported: its attention biases by distance (ALiBi) are not implemented"
        raise raw.fail("model_type", message, UNSUPPORTED_HINT)
    hf_config.require(raw, norm_head=False)
    return ModelConfig(**hf_config.common(raw, activations=hf_config.SILU), build_layer=layer)
