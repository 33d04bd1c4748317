"""The reference attention kernels in plain torch: dense, over cache blocks, and latent."""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.kernels.paged import Ragged, Scoring


def attend_dense(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention of query [batch, tokens, heads, head_dim] to keys, values [batch, kv_heads, length, head_dim]."""
    # The new tokens are the last positions. Returns [batch, tokens, heads * head_dim]. mask: bool [tokens, length],
    # True where a token attends to a position; None if each attends to all before it, or for a single token, which
    # attends to its last `window` positions. scale, softcap: as in `AttentionSpec`. Quantized ones are decoded first.
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.data.shape[1]
    if tokens == 1 and chunk is not None:
        window = (keys.data.shape[2] - 1) % chunk + 1
    if tokens == 1 and window is not None:
        keys, values = keys.last(window), values.last(window)
    key, value = keys.dense(query.dtype), values.dense(query.dtype)
    if softcap is not None or sinks is not None:
        return _attend_fp32(
            query,
            key,
            value,
            mask,
            Scoring(head_dim**-0.5 if scale is None else scale, None, softcap or 0.0, sinks=sinks),
        )
    if tokens == 1:
        # The query heads of one key head become the rows of one product: no key is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, key, value, scale=scale).reshape(batch, 1, -1)
    attended = _attend_prompt(query.transpose(1, 2), key, value, mask, scale)
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    heads, kv_heads, tokens, length = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    if mask is None and tokens < length:
        if (attended := _flash(query, key, value, scale)) is not None:
            return attended
        mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    if mask is not None and query.is_cuda and heads != kv_heads:
        # For a mask with grouped heads torch takes its math kernel, which writes out all scores in fp32: flash rejects
        # masks, and the memory-efficient kernel rejects grouped heads.
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=key.shape[1] != heads,
        scale=scale,
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    # Flash attention of the last positions without a mask, as torch.nn.attention.bias.causal_lower_right calls it; that
    # module takes seconds to import. None where torch has no flash kernel for these tensors.
    if not query.is_cuda or query.shape[3] % 8:
        return None
    params = SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    if not can_use_flash_attention(params):
        return None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # To this operator "causal" means that the last query sees the last key.
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal=True, return_debug_mask=False, scale=scale
    )[0]
    return attended


def _attend_fp32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    # torch has no kernel with a softcap or sinks. One key head at a time: the scores are large.
    batch, tokens, heads, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    if mask is None and tokens > 1:
        mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    grouped = query.view(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    out = torch.empty_like(grouped)
    for head in range(kv_heads):
        rows = grouped[:, :, head].transpose(1, 2).float()  # [batch, copies, tokens, head_dim]
        scores = rows @ key[:, head].float().transpose(-1, -2).unsqueeze(1)
        scores = scores * scoring.scale
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if scoring.sinks is not None:
            copies = heads // kv_heads
            sink = scoring.sinks[head * copies : (head + 1) * copies].float().view(1, copies, 1, 1)
            scores = torch.cat((scores, sink.expand(batch, copies, tokens, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[:, :, head] = (weights @ value[:, head].float().unsqueeze(1)).transpose(1, 2).to(query.dtype)
    return out.view(batch, tokens, -1)


def attend_gathered(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor:
    """Attention of a ragged batch over cache blocks: query [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
    # keys, values: [blocks, kv_heads, block_size, head_dim], int4 as bytes of two codes. Scores and sums are fp32 (fp64
    # for an fp64 query), the result has the dtype of the query. Sequences are computed one after another.
    starts, lengths = ragged.starts.tolist(), ragged.lengths.tolist()
    out = torch.empty_like(query)
    for s, length in enumerate(lengths):
        first, end = starts[s], starts[s + 1]
        if first < end:
            blocks = ragged.block_table[s].long()
            rows = query[first:end].transpose(0, 1)
            out[first:end] = _attend_sequence(rows, keys, values, blocks, length, scoring).transpose(0, 1)
    return out.flatten(1)


def _attend_sequence(
    query: Tensor, keys: Stored, values: Stored, blocks: Tensor, length: int, scoring: Scoring
) -> Tensor:
    # query [heads, tokens, head_dim] to the same shape.
    heads, tokens, _ = query.shape
    kv_heads, block_size = keys.data.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    start = length - tokens
    oldest = 0 if scoring.window is None else max(0, start - scoring.window + 1)
    position = torch.arange(oldest, length, device=query.device)
    token = torch.arange(start, length, device=query.device).unsqueeze(1)
    visible = position <= token
    if scoring.window is not None:
        visible &= token - position < scoring.window
    if scoring.chunk is not None:
        visible &= position >= token - token % scoring.chunk
    block, inside = blocks[position // block_size], position % block_size
    out = torch.empty_like(query)
    group = heads // kv_heads
    for head in range(kv_heads):  # one at a time: scores are [group, tokens, length]
        query_heads = slice(head * group, (head + 1) * group)
        key, value = (_vectors(stored, block, head, inside, exact) for stored in (keys, values))
        scores = query[query_heads].to(exact) @ key.T * scoring.scale
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if scoring.sinks is not None:
            sink = scoring.sinks[query_heads].to(exact).view(group, 1, 1).expand(group, tokens, 1)
            scores = torch.cat((scores, sink), dim=-1)
        out[query_heads] = (scores.softmax(-1)[..., : len(position)] @ value).to(query.dtype)
    return out


def _vectors(stored: Stored, block: Tensor, head: int, inside: Tensor, dtype: torch.dtype) -> Tensor:
    scales = None if stored.scales is None else stored.scales[block, head, inside]
    return Stored(stored.data[block, head, inside], scales).dense(dtype)


def attend_latent(
    query: Tensor, rotated_query: Tensor, latents: Stored, rotated: Stored, ragged: Ragged, scale: float
) -> Tensor:
    """Latent attention of a ragged batch: query [tokens, heads, rank] to the same shape; see `LatentAttentionSpec`."""
    # rotated_query: [tokens, heads, rope_dim]; latents, rotated: [blocks, 1, block_size, ...]. Sums as in
    # `attend_gathered`. One head at a time: its scores are [tokens, length].
    # Latents are both keys and values, so they are gathered and decoded once for all heads.
    exact = torch.promote_types(query.dtype, torch.float32)
    starts, lengths, block_size = ragged.starts.tolist(), ragged.lengths.tolist(), latents.data.shape[2]
    out = torch.empty_like(query)
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        tokens = rows.stop - rows.start
        position = torch.arange(length, device=query.device)
        block, inside = ragged.block_table[s].long()[position // block_size], position % block_size
        value, key = (_vectors(stored, block, 0, inside, exact) for stored in (latents, rotated))
        hidden = position > position[length - tokens :].unsqueeze(1)
        for head in range(query.shape[1]):
            scores = query[rows, head].to(exact) @ value.T + rotated_query[rows, head].to(exact) @ key.T
            weights = (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows, head] = (weights @ value).to(query.dtype)
    return out
