"""StarCoder 1 and SantaCoder (GPT BigCode): GPT-2 with one head of keys and values."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.gpt2 import Gpt2Layers, read_gpt2
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    hf_config.require(raw, multi_query=True)
    return read_gpt2(raw, Gpt2Layers(transposed=False, by_layer=False), "gelu_pytorch_tanh", kv_heads=1)
