"""A pass over few tokens by fused Triton kernels: decoding of up to 64 sequences, and judging what was drafted.

The plain model launches some forty operations for a layer; here a layer is four products and attention, five launches
that each do what follows as well, or ten to thirteen where tokens choose experts, and nothing passes through the host.
Made for a loaded model where all of its layers can be done this way; on other devices, for other weights and for longer
passes the plain model runs. Numbers are rounded where the plain model rounds them, but for what comes out of a norm
(`triton.residual`). Knows kernels and layers; not sampling, nor how launches are replayed
(`runtime.engine.cuda_graph`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.unfused import unfused
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.triton.attention import (
    attend_stages,
    decode_attention,
    queries_of,
    tokens_at_once,
)
from mycli.runtime.kernels.triton.experts import ExpertTable
from mycli.runtime.kernels.triton.gated_silu import activate
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.mixture import FusedMixture, SharedExpert
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul
from mycli.runtime.kernels.triton.residual import Norm, add, embed
from mycli.runtime.kernels.triton.rope import Projection, project
from mycli.runtime.layers.block import Attention, Block
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import MOST_ROWS


class SecondHalf(Protocol):
    """What follows attention in a layer."""

    def largest(self) -> int:
        """The most rows that a weight has whose product needs counters."""
        ...

    def follow(
        self, attended: Activation, o: TritonMatmul, stream: Tensor, following: Norm | None, counters: Tensor
    ) -> Activation | None:
        """Adds the product with `o`, and then its own, to the stream [rows, size]; its norm as an operand.

        Without a norm that follows, there is none. counters: as in `residual.add`.
        """
        ...


@dataclass(frozen=True)
class _Dense:
    """An MLP behind a norm."""

    norm: Norm
    down: TritonMatmul

    def largest(self) -> int:
        """As `SecondHalf.largest`."""
        return max(self.norm.product.n, self.down.n)

    def follow(
        self, attended: Activation, o: TritonMatmul, stream: Tensor, following: Norm | None, counters: Tensor
    ) -> Activation | None:
        """As `SecondHalf.follow`."""
        normed = add(attended, o, stream, self.norm, counters)
        assert normed is not None
        active = activate(normed, self.norm.product, stream.dtype, self.down, counters)
        return add(active, self.down, stream, following, counters)


@dataclass(frozen=True)
class _Layer:
    """What a layer multiplies by, and how its queries and keys are made."""

    input_norm: Norm
    o: TritonMatmul
    second: SecondHalf
    projection: Projection
    window: int | None

    def largest(self) -> int:
        """The most rows that one of its weights has whose product needs counters."""
        return max(self.input_norm.product.n, self.o.n, self.second.largest())


def _only(linear: Linear) -> TritonMatmul | None:
    """Its one product, where a Triton kernel does it."""
    return linear.matmul if isinstance(linear.matmul, TritonMatmul) else None


def _products(linears: Mapping[str, Linear]) -> dict[str, TritonMatmul] | str:
    """What each multiplies by, or why not all are products of a Triton kernel; a bias has only qkv."""
    products: dict[str, TritonMatmul] = {}
    for name, linear in linears.items():
        product = _only(linear)
        if product is None:
            return f"{linear.specs[0].name} is not one packed product"
        if name != "qkv" and linear.bias is not None:
            return f"{linear.specs[0].name} has a bias"
        products[name] = product
    return products


def _dense(mlp: Mlp) -> SecondHalf | str:
    """The second half of a layer without experts."""
    products = _products({"gate_up": mlp.gate_up, "down": mlp.down})
    if isinstance(products, str):
        return products
    assert mlp.norm is not None  # `unfused` has looked
    return _Dense(Norm(mlp.norm.weight, mlp.norm.eps, products["gate_up"]), products["down"])


def _mixture(experts: Experts) -> SecondHalf | str:
    """The second half of a layer with experts, all of which are in memory."""
    linears = experts.in_memory()
    if linears is None:
        return "not all of its experts are in memory"
    gate_up, down = (ExpertTable.of([linear.matmul for linear in each]) for each in linears)
    if isinstance(gate_up, Declined) or isinstance(down, Declined):
        return "its experts are not packed alike"
    router, gate = (None if linear is None else linear.matmul for linear in (experts.router, experts.shared_gate))
    if not isinstance(router, DenseMatmul) or not isinstance(gate, DenseMatmul | None):
        return f"{experts.spec.router.name} is not one dense product"
    shared = None
    if experts.shared is not None:
        products = _products({"gate_up": experts.shared.gate_up, "down": experts.shared.down})
        if isinstance(products, str):
            return products
        if products["gate_up"].packing != gate_up.weights[0].packing:
            return f"{experts.shared.gate_up.specs[0].name} is not packed as the other experts are"
        shared = SharedExpert(products["gate_up"], products["down"], None if gate is None else gate.dequantize())
    assert experts.norm is not None  # as above
    norm = Norm(experts.norm.weight, experts.norm.eps, gate_up.weights[0])
    return FusedMixture(norm, router.dequantize(), experts.spec.routing, experts.correction, gate_up, down, shared)


def _layer(block: Block) -> _Layer | str:
    """The layer, of a model that is not `unfused`, or why there is none."""
    attention, mlp = block.mixer, block.mlp
    assert isinstance(attention, Attention) and attention.norm is not None  # `unfused` has looked
    products = _products({"qkv": attention.qkv, "o": attention.o})
    if isinstance(products, str):
        return products
    second = _mixture(mlp) if isinstance(mlp, Experts) else _dense(mlp)
    if isinstance(second, str):
        return second
    projection = Projection(
        attention.spec.heads,
        attention.qkv.bias,
        None if attention.q_norm is None else attention.q_norm.weight,
        None if attention.k_norm is None else attention.k_norm.weight,
        attention.norm.eps if attention.q_norm is None else attention.q_norm.eps,
    )
    normed = Norm(attention.norm.weight, attention.norm.eps, products["qkv"])
    return _Layer(normed, products["o"], second, projection, attention.spec.window)


class DecodeStep:
    """The fused pass of one model. `make` says whether there is one."""

    def __init__(self, model: Transformer, layers: tuple[_Layer, ...]) -> None:
        self._model, self._layers = model, layers
        self._head = _only(model.head)
        final = None if self._head is None else Norm(model.norm.weight, model.norm.eps, self._head)
        self._following = (*(layer.input_norm for layer in layers[1:]), final)
        # More than any launch has pieces; each leaves them zero. One array: launches follow each other.
        pieces = (MOST_ROWS // 16) * max(layer.largest() for layer in layers) // 16 + MOST_ROWS * model.config.kv_heads
        self._counters = torch.zeros(pieces, dtype=torch.int32, device=model.device)

    @classmethod
    def make(cls, model: Transformer) -> "DecodeStep | str":
        """For `model` as it is loaded, or the reason why it has none."""
        if model.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in {model.dtype}"
        reason = unfused(model.config)
        if reason is not None:
            return reason
        layers = []
        for block in model.layers():
            layer = _layer(block)
            if isinstance(layer, str):
                return layer
            layers.append(layer)
        return cls(model, tuple(layers))

    def takes(self, sequences: int, tokens: int) -> bool:
        """Whether a pass over so many new tokens is one for this step."""
        config, chip = self._model.config, self._layers[0].o.chip
        group = config.heads // config.kv_heads
        each = tokens_at_once(tokens, group)
        if sequences * tokens > MOST_ROWS or not each:
            return False
        queries = queries_of(each, group)
        return attend_stages(chip, config.head_dim, queries, self._model.dtype.itemsize) > 0  # codes need no more

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
    ) -> Tensor:
        """Logits [sequences, 1 if last else new, vocab] in the model's dtype; keys and values go into the cache.

        tokens int64 [sequences, new]; lengths int32 [sequences], the tokens of each once the new ones are there;
        tables: cosines and sines [block_size, head_dim / 2]. `cache` has a block for each sequence.
        """
        sequences, new = tokens.shape
        counters = self._counters
        stream, first = embed(tokens.reshape(-1).contiguous(), self._model.embedding, self._layers[0].input_norm)
        x: Activation | None = first
        for index, (layer, following) in enumerate(zip(self._layers, self._following, strict=True)):
            assert x is not None  # only a head that is not packed has no operand
            keys, values = cache.all(index)
            stored = LayerCache(keys.data, values.data, keys.scales, values.scales)
            qkv = layer.input_norm.product
            query = project(x, qkv, layer.projection, tables, lengths, stored, stream.dtype, counters)
            attended = decode_attention(query, stored, lengths, layer.window, layer.o, counters)
            x = layer.second.follow(attended, layer.o, stream, following, counters)
        return self._logits(x, stream.view(sequences, new, -1), last)

    def _logits(self, x: Activation | None, stream: Tensor, last: bool) -> Tensor:
        """From the operand of the head, or for a dense one from the stream [sequences, new, hidden]."""
        if self._head is None or x is None:
            logits: Tensor = self._model.head(self._model.norm(stream[:, -1:] if last else stream))
            return logits
        logits = self._head.multiply(x, stream.dtype).view(*stream.shape[:2], -1)
        return logits[:, -1:] if last else logits
