"""Where tokens enter the residual stream, and where logits leave the head: the multipliers and the cap of a family.

Knows a config and one tensor at a time; the table and the head are the caller's.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.models.config import ModelConfig


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """What rows of the embedding are multiplied by as they enter the first layer in `dtype`."""
    if config.round_embedding_scale:
        return torch.tensor(config.embedding_scale, dtype=dtype).item()
    return config.embedding_scale


def scale_embeddings(x: Tensor, config: ModelConfig) -> Tensor:
    """Rows of the embedding as they enter the first layer, in the dtype of x."""
    if config.embedding_scale == 1.0:
        return x
    return x * embedding_scale(config, x.dtype)


def embed_tokens(tokens: Tensor, table: Tensor, config: ModelConfig) -> Tensor:
    """tokens int64 [...] to the residual stream [..., hidden] by table [vocab, hidden], in its dtype."""
    return scale_embeddings(functional.embedding(tokens, table), config)


def finish_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """What the head put out, as fp32 logits: multiplied and capped in fp32, so that no two tokens become one."""
    logits = logits.float()
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits
