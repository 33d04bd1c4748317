"""The MTP head (multi-token prediction), as DeepSeek-V3 (arXiv 2412.19437, 2.2) and Qwen 3 Next ship it.

At position i it reads the hidden state h_i that the model's head reads there, and the embedding of the next token:
x = W [norm(embed(t_(i+1))); norm(h_i)]. x passes one layer with full attention over the positions before, and a norm;
the model's own head turns the result g_i into logits of t_(i+2). Where h_(i+1) is not known yet, g_i takes its place,
so one module predicts several tokens in turn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.passes.cpu import compile_layers
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import run_layers
from mycli.runtime.layers.vocabulary import embed_tokens, finish_logits


class MtpHead(nn.Module):
    """The MTP head in `folder` for the model of `target`, whose embedding and output projection it uses."""

    def __init__(self, folder: ModelFolder, target: ModelRunner) -> None:
        super().__init__()
        self.config, self.target = folder.config, target
        embedding_norm, hidden_norm, join = self.config.mtp_inputs()
        self.embedding_norm, self.hidden_norm = RMSNorm(embedding_norm), RMSNorm(hidden_norm)
        self.join = Linear((join,))
        self.block = Block(self.config.layer(0))
        self.norm = RMSNorm(self.config.norm())
        checkpoint, device, dtype = folder.checkpoint(), target.device, target.dtype
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.load(checkpoint, device, dtype)
        self.join.load(checkpoint, {}, device, dtype)
        self.block.load(checkpoint, {}, device, dtype)
        self.block.freeze()
        self._native = compile_layers([self.block], device, dtype, target.kv)

    @property
    def nbytes(self) -> int:
        weights = sum(module.nbytes for module in self.modules() if isinstance(module, Linear))
        return weights + sum(module.weight.nbytes for module in self.modules() if isinstance(module, RMSNorm))

    @property
    def read_bytes(self) -> int:
        """Bytes that predicting a token reads: those of this head and of the output projection."""
        return self.nbytes + self.target.model.head.nbytes

    def make_cache(self, shape: CacheShape) -> KVCache:
        """Return an empty cache of its one layer, of the target's kind."""
        dtype = cache_dtype(self.target.kv, self.target.dtype)
        return KVCache(self.config, shape.blocks, shape.block_size, self.target.device, dtype)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], hidden: Tensor, rope: Rope, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return g [T, hidden] of all rows, and logits fp32 [rows, vocab] of those that the chunks ask for.

        chunks: for each position the token after it; hidden [T, hidden]: h of each position. Keys and values go into
        the cache.
        """
        model, batch = self.target.model, Batch.of(chunks, cache.block_size, self.target.device)
        embedded: Tensor = self.embedding_norm(embed_tokens(batch.tokens, model.embedding, self.config))
        x = self.join(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))[None]
        if self._native is not None and self._native.takes(batch.rows):
            x = self._native.run(x, chunks, rope, cache)
        else:
            x = run_layers([self.block], x, batch, rope, cache)
        g: Tensor = self.norm(x)[0]
        if not any(chunk.logits for chunk in chunks):
            return g, torch.empty(0, self.config.vocab_size, device=g.device)
        return g, finish_logits(model.head(g.index_select(0, batch.logits_at)), self.config)
