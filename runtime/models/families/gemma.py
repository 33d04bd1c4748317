"""Gemma 1 and CodeGemma: Llama with norms of gain 1 + w, GELU, scaled embeddings and a head_dim of its own."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import ActivationName
from mycli.runtime.utils.json_fields import Fields

# Older files name the exact GELU; the models were trained with the tanh approximation.
_GELU: dict[str, ActivationName] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=256, tie_word_embeddings=True, eos_token_id=1, bos_token_id=2)
    fields = hf_config.common(raw, activations=_GELU)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        norm_offset=1.0,
        embedding_scale=fields["hidden_size"] ** 0.5,
        round_embedding_scale=True,
    )
