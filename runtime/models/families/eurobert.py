"""EuroBERT encoders, which compute embeddings (Jina Embeddings 5 nano): Llama with bidirectional attention."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import llama_bidirec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    return replace(llama_layer(config, index), ignored_prefixes=("lm_head.",))  # of the masked language model


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, max_position_embeddings=8192)
    return replace(llama_bidirec.read(raw), build_layer=layer)
