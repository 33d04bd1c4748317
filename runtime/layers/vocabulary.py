"""Token embeddings at the input and logits at the output: the multipliers and the softcap of a family."""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.models.config import ModelConfig


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the factor of embeddings in `dtype`."""
    if config.round_embedding_scale:
        return torch.tensor(config.embedding_scale, dtype=dtype).item()
    return config.embedding_scale


def scale_embeddings(x: Tensor, config: ModelConfig) -> Tensor:
    if config.embedding_scale == 1.0:
        return x
    return x * embedding_scale(config, x.dtype)


def embed_tokens(tokens: Tensor, table: Tensor, config: ModelConfig) -> Tensor:
    """Return the residual stream [..., hidden] of tokens int64 [...], in the dtype of table [vocab, hidden]."""
    return scale_embeddings(functional.embedding(tokens, table), config)


def finish_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """Return fp32 logits, scaled and capped in fp32, so that no two different logits become equal."""
    logits = logits.float()
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits
