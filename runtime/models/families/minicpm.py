"""MiniCPM 1, 2 and 4 (0.5B to 8B): Llama with embeddings, residuals and logits scaled, and longrope."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    # Defaults of the published configuration_minicpm.py. `sparse_config` (MiniCPM 4.1) is not read: attention is dense,
    # as in llama.cpp.
    raw = hf_config.with_defaults(raw, tie_word_embeddings=True)
    fields = hf_config.common(raw, handled=("longrope",))
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        embedding_scale=raw.number("scale_emb", 1.0, low=1e-9, high=1e6),
        residual_scale=raw.number("scale_depth", 1.0, low=1e-9, high=1e6) / fields["layers"] ** 0.5,
        logit_scale=raw.number("dim_model_base", 1.0, low=1e-9, high=1e9) / fields["hidden_size"],
    )
