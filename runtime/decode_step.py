"""A pass over a few tokens by fused Triton kernels: decoding, and judging what was drafted.

The plain model launches some forty operations for a layer; here a layer is four products and what lies between them,
nine launches, and nothing passes through the host. Made for a loaded model where all of its layers can be done this
way; on other devices, for other weights and for longer passes the plain model runs. Numbers are rounded where the plain
model rounds them. Knows kernels and layers; not sampling, nor how launches are replayed (`mycli.runtime.replay`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache import StaticCache
from mycli.runtime.kernels.triton_decode import (
    LayerCache,
    Projection,
    add_norm,
    attend,
    rotate_and_store,
    silu_multiply,
)
from mycli.runtime.kernels.triton_packed import TritonMatmul
from mycli.runtime.linear import Linear
from mycli.runtime.transformer import Block, Transformer

MOST_ROWS = 8  # tokens of all sequences: so many cost the matrix product no more than one
MOST_QUERIES = 64  # of a key-value head: tokens times the heads that share it


@dataclass(frozen=True)
class _Layer:
    """What a layer multiplies by, and how its queries and keys are made."""

    input_gain: Tensor
    post_gain: Tensor
    qkv: TritonMatmul
    o: TritonMatmul
    gate_up: TritonMatmul
    down: TritonMatmul
    projection: Projection
    window: int | None


def _only(linear: Linear) -> TritonMatmul | None:
    """Its one product, where a Triton kernel does it."""
    first = linear.matmuls[0]
    return first if len(linear.matmuls) == 1 and isinstance(first, TritonMatmul) else None


def _layer(block: Block) -> _Layer | str:
    """The layer, or why there is none."""
    products = {name: _only(block.product(name)) for name in Block.INPUTS}
    for name, product in products.items():
        linear = block.product(name)
        if product is None:
            return f"{linear.specs[0].name} is not one packed product"
        if name != "qkv" and linear.bias is not None:
            return f"{linear.specs[0].name} has a bias"
    config = block.config
    projection = Projection(
        config.heads,
        block.qkv.bias,
        None if block.q_norm is None else block.q_norm.weight,
        None if block.k_norm is None else block.k_norm.weight,
        config.rms_norm_eps,
    )
    window = config.window(block.layer)
    return _Layer(block.input_norm.weight, block.post_norm.weight, **products, projection=projection, window=window)  # type: ignore[arg-type]  # none is None


class DecodeStep:
    """The fused pass of one model. `make` says whether there is one."""

    def __init__(self, model: Transformer, layers: tuple[_Layer, ...]) -> None:
        self._model, self._layers = model, layers
        self._eps = model.config.rms_norm_eps
        self._head = _only(model.head)
        self._counters = torch.zeros(MOST_ROWS * model.config.kv_heads, dtype=torch.int32, device=model.device)

    @classmethod
    def make(cls, model: Transformer) -> "DecodeStep | str":
        """For `model` as it is loaded, or the reason why it has none."""
        if model.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in {model.dtype}"
        layers = []
        for block in model.layers():
            layer = _layer(block)
            if isinstance(layer, str):
                return layer
            layers.append(layer)
        return cls(model, tuple(layers))

    def takes(self, sequences: int, tokens: int) -> bool:
        """Whether a pass over so many new tokens is one for this step."""
        config = self._model.config
        return sequences * tokens <= MOST_ROWS and tokens * (config.heads // config.kv_heads) <= MOST_QUERIES

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: StaticCache, last: bool
    ) -> Tensor:
        """Logits [sequences, 1 if last else new, vocab] in the model's dtype; keys and values go into the cache.

        tokens int64 [sequences, new]; lengths int32 [sequences], the tokens of each once the new ones are there;
        tables: cosines and sines [capacity, head_dim / 2]. Does not advance the cache.
        """
        sequences, new = tokens.shape
        stream = functional.embedding(tokens.reshape(-1), self._model.embedding)
        parts: Tensor | None = None
        for index, layer in enumerate(self._layers):
            stream, x = add_norm(parts, stream, layer.input_gain, self._eps, layer.qkv)
            keys, values = cache.all(index)
            stored = LayerCache(keys.data, values.data, keys.scales, values.scales)
            query = rotate_and_store(layer.qkv.partial(x), layer.projection, *tables, lengths, stored, stream.dtype)
            attended = attend(query, stored, lengths, layer.window, layer.o, self._counters)
            stream, x = add_norm(layer.o.partial(attended), stream, layer.post_gain, self._eps, layer.gate_up)
            parts = layer.down.partial(silu_multiply(layer.gate_up.partial(x), stream.dtype, layer.down))
        if last and new > 1 and parts is not None:  # the head is a good part of a small model
            parts = parts.view(-1, sequences, new, parts.shape[-1])[:, :, -1].contiguous()
            stream = stream.view(sequences, new, -1)[:, -1].contiguous()
        return self._logits(parts, stream).view(sequences, -1, self._model.config.vocab_size)

    def _logits(self, parts: Tensor | None, stream: Tensor) -> Tensor:
        gain = self._model.norm.weight
        if self._head is None:
            logits: Tensor = self._model.head(add_norm(parts, stream, gain, self._eps, None)[1])
            return logits
        return self._head.multiply(add_norm(parts, stream, gain, self._eps, self._head)[1], stream.dtype)
