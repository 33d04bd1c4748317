"""Scaling of embeddings and logits: the multipliers, the embedding norm and the softcap of a model family."""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.kernels.registry import RMS_NORM
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.portable_math import tangent


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the factor for embeddings of `dtype`."""
    # Gemma rounds the factor to the dtype before multiplying; the reference logits depend on it.
    if config.round_embedding_scale:
        return torch.tensor(config.embedding_scale, dtype=dtype).item()
    return config.embedding_scale


def scale_embeddings(x: Tensor, config: ModelConfig) -> Tensor:
    """Scale or norm embeddings x for the first layer, in their dtype."""
    if config.embedding_norm:
        return RMS_NORM(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), config.rms_norm_eps)
    if config.embedding_scale == 1.0:
        return x
    return x * embedding_scale(config, x.dtype)


def embed_tokens(tokens: Tensor, table: Tensor, config: ModelConfig) -> Tensor:
    """Embed tokens int64 [...] with table [vocab, hidden]; return the residual stream [..., hidden] in its dtype."""
    return scale_embeddings(functional.embedding(tokens, table), config)


def finish_logits(logits: Tensor, config: ModelConfig, portable: bool = False) -> Tensor:
    """Scale and softcap the output of the head in fp32; portable: with the same bits on every CPU."""
    # In fp32: in bf16 different logits would round to the same value.
    logits = logits.float()
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        capped = logits / config.logit_softcap
        capped = tangent(capped.double()).float() if portable else torch.tanh(capped)
        logits = capped * config.logit_softcap
    return logits
