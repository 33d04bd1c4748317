"""The MTP head (multi-token prediction), as DeepSeek-V3 (arXiv 2412.19437, 2.2) and Qwen 3 Next ship it.

At position i it reads the hidden state h_i that the model's head reads there, and the embedding of the next token:
x = W [norm(embed(t_(i+1))); norm(h_i)]. x passes one layer with full attention over the positions before, and a norm;
the model's own head turns the result g_i into logits of t_(i+2). Where h_(i+1) is not known yet, g_i takes its place,
so one module predicts several tokens in turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes.cpu import compile_layers
from mycli.runtime.engine.sequence import reply_room
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, run_layers
from mycli.runtime.layers.vocabulary import embed_tokens, finish_logits
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.speculative.proposers import DraftState, Proposal


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
        weights = CheckpointWeights(folder.checkpoint(dtype=target.dtype), {}, target.device, target.dtype)
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            norm.load(weights)
        self.join.load(weights)
        self.block.load(weights)
        self.block.freeze()
        self._native = compile_layers([self.block], target.device, target.dtype, target.kv)

    @property
    def nbytes(self) -> int:
        weights = sum(module.nbytes for module in self.modules() if isinstance(module, Linear))
        return weights + sum(module.weight.nbytes for module in self.modules() if isinstance(module, RMSNorm))

    @property
    def read_bytes(self) -> int:
        """Bytes that predicting a token reads: those of this head and of the output projection."""
        return self.nbytes + self.target.model.head.nbytes

    def make_cache(self, shape: CacheShape) -> KVCache:
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
        return g, finish_logits(model.head(g.index_select(0, batch.logits_at)), self.config, model.portable)


@dataclass(eq=False)
class _MtpSequence:
    """One sequence: positions from `begin` are in the cache as far as `table` says; `states` [n, hidden] are the hidden
    states of the positions after those."""

    begin: int
    table: BlockTable
    states: Tensor

    @property
    def computed(self) -> int:
        return self.begin + self.table.length

    @property
    def end(self) -> int:
        return self.computed + len(self.states)


class MtpProposer:
    """The MTP head as a `Proposer`, run token after token.

    A hook gives it the hidden states of the model's passes. It proposes nothing for a sequence without hidden states
    (its prefix came from the prefix cache) or without cache space.
    """

    def __init__(self, head: MtpHead, shape: CacheShape) -> None:
        """shape: of the target's cache."""
        self.head, self.shape = head, shape
        self.cache = head.make_cache(shape)
        self.relative_cost = head.read_bytes / max(head.target.nbytes, 1)
        self._pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size))
        self._sequences: dict[int, _MtpSequence] = {}
        self._chunk = prefill_chunk(head.target.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + self.cache.nbytes

    def lag(self, sequence: int, tokens: Sequence[int]) -> int:
        known = self._sequences.get(sequence)
        return 0 if known is None else len(known.states)

    def evidence(self, sequence: int, tokens: Sequence[int]) -> int:
        return 0

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> HiddenStateHook:
        parts = list(parts)

        def hook(hidden: Tensor) -> None:
            for part, states in zip(parts, torch.split(hidden, [part.count for part in parts]), strict=True):
                self._add_states(part, states)

        return hook

    def _add_states(self, part: ComputedTokens, states: Tensor) -> None:
        known = self._sequences.get(part.sequence)
        if known is None or not known.begin <= part.start <= known.end:
            self._drop(part.sequence)
            known = self._sequences[part.sequence] = _MtpSequence(part.start, BlockTable(self._pool), states[:0])
        known.states = torch.cat((known.states, states[known.end - part.start :]))
        # The states of a long prompt are not kept: a chunk is computed as soon as it is complete.
        while len(known.states) > self._chunk and known.computed + self._chunk < len(part.tokens):
            if not known.table.reserve(known.table.length + self._chunk):
                return self._drop(part.sequence)
            self._run([(known, part.tokens[known.computed + 1 :][: self._chunk], known.states[: self._chunk], 0)])
            known.states = known.states[self._chunk :].clone()

    def _drop(self, sequence: int) -> None:
        known = self._sequences.pop(sequence, None)
        if known is not None:
            known.table.discard()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [DraftState(request, *self._room(request)) for request in requests]
        active = [draft for draft in drafts if draft.count > 0]
        sequences = [self._sequences[draft.request.sequence] for draft in active]
        pairs = zip(active, sequences, strict=True)
        g, logits = self._run(
            [(known, draft.request.tokens[known.computed + 1 :], known.states, 1) for draft, known in pairs]
        )
        for known in sequences:
            known.states = known.states[:0]
        lengths = [known.table.length for known in sequences]
        self._sample(active, g, logits)
        for known, length in zip(sequences, lengths, strict=True):
            known.table.truncate(length)  # later positions were computed from g in place of hidden states
        return [draft.proposal for draft in drafts]

    def _room(self, request: DraftRequest) -> tuple[BlockTable, int]:
        known = self._sequences.get(request.sequence)
        if known is None or not len(known.states) or known.end != len(request.tokens) - 1:
            return BlockTable(self._pool), 0
        count = min(request.count, reply_room(self.shape.context, len(request.tokens)))
        fits = known.table.reserve(known.table.length + len(known.states) + max(count - 1, 0))
        return known.table, count if fits else 0

    def _sample(self, active: list[DraftState], g: Tensor, logits: Tensor) -> None:
        for draft in active:
            draft.rows = draft.request.sampler.probability_rows(draft.count, logits.dtype)
        while active:
            rows = []
            for row, draft in enumerate(active):
                draft.logits = logits[row : row + 1]
                if draft.sample() is None:  # NaN in the cache would spoil every later token
                    self._drop(draft.request.sequence)
                elif len(draft.tokens) < draft.count:
                    rows.append(row)
            active, g = [active[row] for row in rows], g[rows]
            parts = [
                (self._sequences[draft.request.sequence], draft.tokens[-1:], state[None], 1)
                for draft, state in zip(active, g, strict=True)
            ]
            g, logits = self._run(parts)

    def _run(self, parts: Sequence[tuple[_MtpSequence, Sequence[int], Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Run a pass; return g of the last position of each sequence [sequences, hidden], and the requested logits.

        parts: sequence, the tokens after its next positions, their hidden states, and 1 if logits are needed, else 0.
        """
        if not parts:
            return torch.empty(0), torch.empty(0)
        chunks = [
            Chunk(tokens, known.table.length, tuple(known.table.blocks), logits_count)
            for known, tokens, _, logits_count in parts
        ]
        rope = self.head.target.rope(max(self.cache.block_size, *(chunk.length for chunk in chunks)))
        g, logits = self.head(chunks, torch.cat([states for _, _, states, _ in parts]), rope, self.cache)
        for known, tokens, _, _ in parts:
            known.table.length += len(tokens)
        return g[[end - 1 for end in accumulate(chunk.count for chunk in chunks)]], logits

    def truncate(self, sequence: int, length: int) -> None:
        known = self._sequences.get(sequence)
        if known is not None:
            known.states = known.states[: max(length - known.computed, 0)]

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        self._drop(sequence)

    def forget(self) -> None:
        """Do nothing: nothing outlives its sequence."""
