"""Bidirectional attention, in which every token attends to the whole text, and the forward pass of embedding models."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.layers.attention import KeyValue
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.vocabulary import embed_tokens
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec


class BidirectionalAttention:
    """Attention within whole texts, without a KV cache.

    lengths: tokens of each text in the pass, in order; biases: returns those of the scores of a text by its length.
    """

    def __init__(self, lengths: Sequence[int], biases: Callable[[int], Tensor | None] = lambda length: None) -> None:
        self._lengths = list(lengths)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._biases = {length: biases(length) for length in set(lengths)}

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        if new is None or sinks is not None or spec.softcap or spec.chunk or spec.kv_source is not None:
            raise NotImplementedError("no embedding model has this attention")
        outputs = []
        # One call per text instead of a padded batch: padding and batch size change the order of sums, and with it the
        # last bits of a vector. A text has the same vector alone and in a batch.
        parts = [torch.split(part, self._lengths, dim=1) for part in (query, *new)]
        for q, k, v in zip(*parts, strict=True):
            mask = self._mask(q.shape[1], spec.window, q.device)
            if (bias := self._biases[q.shape[1]]) is not None:
                assert mask is None, "no model has windows and biases"
                mask = bias
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            x = scaled_dot_product_attention(q, k, v, mask, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(x.transpose(1, 2).flatten(2))
        return torch.cat(outputs, dim=1)

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        raise NotImplementedError("no embedding model has latent attention")

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        if window is None or window >= length:
            return None
        if (length, window) not in self._masks:
            # 32 bits and one tensor of distances: of 8,192 tokens they take 256 MiB, and two of 64 bits 1 GiB.
            at = torch.arange(length, dtype=torch.int32, device=device)  # the window extends to both sides
            self._masks[length, window] = (at[:, None] - at).abs_() < window
        return self._masks[length, window]


@torch.inference_mode()
def encode_texts(
    model: Transformer, texts: Sequence[Sequence[int]], rope: Rope, types: Sequence[Sequence[int]] = ()
) -> list[Tensor]:
    """Return the final hidden states [tokens, hidden] of each text, computed in one pass.

    types: the token types of each text, empty for one whose tokens all have type 0.
    """
    chunks = [Chunk(text, 0, (), 0) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text], device=model.device)[None]
    x = embed_tokens(tokens, model.embedding, model.config)
    lengths = [len(text) for text in texts]
    attention = BidirectionalAttention(lengths)
    if model.positions is not None:
        x = model.positions(x, lengths, types)
        attention = BidirectionalAttention(lengths, model.positions.score_biases)
    context = PassContext(rope.rows(chunks), attention)
    for block in model.layers():
        x = block(x, context)
    return list(model.norm(x)[0].split(lengths))
