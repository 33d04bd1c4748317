"""The head that predicts one token further (multi-token prediction): what it computes, and reading it.

As in DeepSeek-V3 (arXiv 2412.19437, 2.2) and in Qwen 3 Next, which ship one module: of a position i it reads the hidden
state that the model's head reads there, h_i, and the embedding of the token after it. Both are normed and joined,
x = W [norm(embed(t_(i+1))); norm(h_i)]; x passes one layer with full attention, whose keys are those of the positions
before, and a norm; from that, g_i, the model's own head says what t_(i+2) is. g_i stands for h_(i+1) where that is not
known yet, so that the one module predicts token after token. Knows one pass; does not know whose texts they are.
"""

import torch
from torch import Tensor, nn

from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.native.chain import Chain
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.vocabulary import embed_tokens, finish_logits


class PredictionHead(nn.Module):
    """The head of `folder` beside the model of `target`, whose embedding and output projection it reads."""

    def __init__(self, folder: ModelFolder, target: ModelRunner) -> None:
        super().__init__()
        self.config, self.target = folder.config, target
        embedding_norm, hidden_norm, join = self.config.mtp_inputs()
        self.embedding_norm, self.hidden_norm = RMSNorm(embedding_norm), RMSNorm(hidden_norm)
        self.join = Linear((join,))
        block = Block(self.config.layer(0))
        self.blocks = Chain([block])
        self.norm = RMSNorm(self.config.norm())
        checkpoint, device, dtype = folder.checkpoint(), target.device, target.dtype
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.load(checkpoint, device, dtype)
        self.join.load(checkpoint, {}, device, dtype)
        block.load(checkpoint, {}, device, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        weights = sum(module.nbytes for module in self.modules() if isinstance(module, Linear))
        return weights + sum(module.weight.nbytes for module in self.modules() if isinstance(module, RMSNorm))

    @property
    def read_bytes(self) -> int:
        """Bytes that predicting a token reads: the head's, and the output projection."""
        return self.nbytes + self.target.model.head.nbytes

    def make_cache(self, shape: CacheShape) -> KVCache:
        """An empty cache of its one layer, of the target's kind."""
        dtype = cache_dtype(self.target.kv, self.target.dtype)
        return KVCache(self.config, shape.blocks, shape.block_size, self.target.device, dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor, rope: Rope, cache: KVCache) -> tuple[Tensor, Tensor]:
        """g [T, hidden] of all rows, and logits fp32 [rows, vocab] of those that the batch wants them of.

        batch: of each position the token after it; hidden [T, hidden]: h of each position. Keys and values go into the
        cache.
        """
        model = self.target.model
        embedded: Tensor = self.embedding_norm(embed_tokens(batch.tokens, model.embedding, self.config))
        x = self.join(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))[None]
        made: Tensor = self.norm(self.blocks.run(x, batch, rope, cache))[0]
        if not sum(batch.wanted):
            return made, torch.empty(0, self.config.vocab_size, device=made.device)
        return made, finish_logits(model.head(made.index_select(0, batch.logits_at)), self.config)
