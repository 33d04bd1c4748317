"""The fused GPU pass: decoding of up to 256 sequences and verification of drafts by fused Triton kernels.

The plain pass launches some forty operations per layer. Here a layer takes five launches, four products and attention,
each with the operations that follow it; a mixture of experts takes ten to thirteen. Each norm after a part, or over all
heads, takes one more. The host is not involved between launches. Values are rounded where the plain pass rounds them,
except for the output of a norm before a product (`triton.residual`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.device.placement import decline_dtype
from mycli.runtime.engine.passes.fused_models import decline_config, norms_all_heads
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Scoring
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.triton.attention import decode_attention, heads_fit
from mycli.runtime.kernels.triton.experts import ExpertTable
from mycli.runtime.kernels.triton.gated_silu import GatedActivation, activate
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.mixture import FusedMixture, FusedRouter, SharedExpert
from mycli.runtime.kernels.triton.product.dense import DenseProduct, decline_dense
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, TritonMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.residual import Norm, Residual, add, embed
from mycli.runtime.kernels.triton.rope import Projection, Rotation, project
from mycli.runtime.layers.attention import attention_scoring
from mycli.runtime.layers.block import Attention, Block
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.layer_part import LayerPart
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.streamed_experts import StreamedExperts
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.vocabulary import embedding_scale, finish_logits
from mycli.runtime.memory.graphs import MOST_ROWS
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.quantization.low_rank import LowRankMatmul


@dataclass(frozen=True)
class _DenseMlp:
    """The MLP of a layer, with the output product of attention before it; used like a `FusedMixture`."""

    norm: Norm
    down: FewRowsProduct
    residual: Residual
    activation: GatedActivation

    def largest(self) -> int:
        return max(self.norm.product.n, self.down.n)

    def add_to(
        self,
        attended: Activation,
        o: FewRowsProduct,
        residual: Residual,
        stream: Tensor,
        next_norm: Norm | None,
        counters: Tensor,
        router_scores: Tensor | None = None,
    ) -> Activation | None:
        """Do as `FusedMixture.add_to`; there is no router."""
        normed = add(attended, o, stream, self.norm, counters, residual=residual)
        assert normed is not None
        active = activate(normed, self.norm.product, stream.dtype, self.down, counters, self.activation)
        return add(active, self.down, stream, next_norm, counters, residual=self.residual)


@dataclass(frozen=True)
class _Layer:
    input_norm: Norm
    o: FewRowsProduct
    residual: Residual
    mlp: _DenseMlp | FusedMixture
    projection: Projection
    scoring: Scoring
    rope: RopeSpec | None

    def largest(self) -> int:
        return max(self.input_norm.product.n, self.o.n, self.mlp.largest())


def _packed(linear: Linear) -> TritonMatmul | None:
    return linear.matmul if isinstance(linear.matmul, TritonMatmul) else None


def _products(linears: Mapping[str, Linear], chip: Chip) -> dict[str, FewRowsProduct] | Declined:
    products: dict[str, FewRowsProduct] = {}
    for name, linear in linears.items():
        if any(isinstance(product, LowRankMatmul) for product in linear.matmuls):
            return Declined("adapted-product", {"linear": linear.specs[0].name})
        if isinstance(linear.matmul, TritonMatmul):
            products[name] = linear.matmul
        elif isinstance(linear.matmul, DenseMatmul):
            weight = linear.matmul.dequantize()
            if (declined := decline_dense(weight)) is not None:
                return declined
            products[name] = DenseProduct(weight, chip)
        else:
            return Declined("not-one-product", {"linear": linear.specs[0].name})
    return products


def _residual(part: LayerPart, product: Linear | None) -> Residual:
    norm, scalar = part.output_norm, part.scalar
    bias = None if product is None else product.bias
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return Residual(bias, gain, eps, part.residual, scalar)


def _norm_before(part: LayerPart, product: FewRowsProduct) -> Norm:
    return Norm(None, 0.0, product) if part.norm is None else Norm(part.norm.weight, part.norm.eps, product)


def _dense_mlp(mlp: Mlp, chip: Chip) -> _DenseMlp | Declined:
    products = _products({"gate_up": mlp.gate_up, "down": mlp.down}, chip)
    if isinstance(products, Declined):
        return products
    activation = GatedActivation(gelu=mlp.spec.activation == "gelu_tanh", bias=mlp.gate_up.bias)
    norm = _norm_before(mlp, products["gate_up"])
    return _DenseMlp(norm, products["down"], _residual(mlp, mlp.down), activation)


def _mixture(experts: Experts, chip: Chip) -> FusedMixture | Declined:
    if isinstance(experts, StreamedExperts):
        return Declined("streamed-experts")
    every = range(len(experts.spec.experts))
    (gate_up_weights, gate_up_bias), (down_weights, down_bias) = (
        linears.operands(every) for linears in (experts.gate_up, experts.down)
    )
    gate_up, down = (ExpertTable.from_weights(weights or ()) for weights in (gate_up_weights, down_weights))
    if isinstance(gate_up, Declined) or isinstance(down, Declined):
        return Declined("mixed-experts")
    router, gate = (None if linear is None else linear.matmul for linear in (experts.router, experts.shared_gate))
    if not isinstance(router, DenseMatmul) or not isinstance(gate, DenseMatmul | None):
        return Declined("packed-router", {"linear": experts.spec.router.name})
    assert experts.norm is not None  # checked by `_decline_experts`
    norm = Norm(experts.norm.weight, experts.norm.eps, gate_up.weights[0])
    shared = None
    if experts.shared is not None:
        products = _products({"gate_up": experts.shared.gate_up, "down": experts.shared.down}, chip)
        if isinstance(products, Declined):
            return products
        dense_gate = None if gate is None else gate.dequantize()
        shared = SharedExpert.after(norm, products["gate_up"], products["down"], dense_gate)
    route = FusedRouter(router.dequantize(), experts.router.bias, experts.spec.routing, experts.correction)
    kind = experts.spec.activation
    clamped, alternating = kind != "silu", kind == "swiglu_clamped"
    activation = GatedActivation(clamped=clamped, alternating=alternating, bias=gate_up_bias)
    return FusedMixture(norm, route, gate_up, activation, down, down_bias, shared, _residual(experts, None))


def _projection(attention: Attention) -> Projection:
    spec = attention.spec
    norms = attention.q_norm, attention.k_norm, attention.v_norm
    query, key, value = (None if norm is None else norm.weight for norm in norms)
    return Projection(
        spec.heads,
        attention.qkv.bias,
        query,
        key,
        value,
        eps=0.0 if attention.q_norm is None else attention.q_norm.eps,
        norm_last=spec.norm_after_rope,
        all_heads=norms_all_heads(spec),
        keys_are_values=not spec.has_v_proj,
    )


def _layer(block: Block, chip: Chip) -> _Layer | Declined:
    attention, mlp = block.mixer, block.mlp
    assert isinstance(attention, Attention) and mlp is not None  # checked by `decline_config`
    products = _products({"qkv": attention.qkv, "o": attention.o}, chip)
    if isinstance(products, Declined):
        return products
    fused_mlp = _mixture(mlp, chip) if isinstance(mlp, Experts) else _dense_mlp(mlp, chip)
    if isinstance(fused_mlp, Declined):
        return fused_mlp
    return _Layer(
        _norm_before(attention, products["qkv"]),
        products["o"],
        _residual(attention, attention.o),
        fused_mlp,
        _projection(attention),
        attention_scoring(attention.spec, attention.sinks),
        attention.spec.rope,
    )


class FusedStep:
    """The fused pass of one model; see `compile`."""

    def __init__(self, model: Transformer, layers: tuple[_Layer, ...]) -> None:
        self._model, self._layers = model, layers
        self._head = _packed(model.head)
        final = None if self._head is None else Norm(model.norm.weight, model.norm.eps, self._head)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), final)
        # At least as many as any launch has pieces. One array for all, because launches run one after another and each
        # resets its counters to zero.
        kv_heads = max(spec.kv_heads for spec in model.config.attentions)
        pieces = (MOST_ROWS // 16) * max(layer.largest() for layer in layers) // 16 + MOST_ROWS * kv_heads
        self._counters = torch.zeros(pieces, dtype=torch.int32, device=model.device)

    @classmethod
    def compile(cls, model: Transformer, kv: KvDtype = "auto") -> "FusedStep | Declined":
        """Build the fused pass of a loaded model, or return why it has none."""
        if model.dtype not in (torch.bfloat16, torch.float16):
            return decline_dtype(model.dtype)
        declined = decline_config(model.config, kv)
        if declined is not None:
            return declined
        modules = (module for module in model.modules() if isinstance(module, Linear))
        chip = next((matmul.chip for module in modules if (matmul := _packed(module)) is not None), None)
        if chip is None:
            return Declined("no-packed-product")
        layers = []
        for block in model.layers():
            layer = _layer(block, chip)
            if isinstance(layer, Declined):
                return layer
            layers.append(layer)
        return cls(model, tuple(layers))

    def takes(self, sequences: int, tokens: int) -> bool:
        """Return whether the kernels do a pass over `tokens` new tokens of each of `sequences`."""
        # Checked with the model's dtype: a quantized KV cache needs no more shared memory.
        chip, element = self._layers[0].o.chip, self._model.dtype.itemsize
        return sequences * tokens <= MOST_ROWS and heads_fit(chip, self._model.config, tokens, element)

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        """Return logits [sequences, 1 if last else new, vocab] in the model's dtype; the cache takes keys and values.

        Logits of padding sequences mean nothing.
        """
        config, (sequences, new) = self._model.config, inputs.tokens.shape
        flat, embedding = inputs.tokens.reshape(-1).contiguous(), self._model.embedding
        scale = embedding_scale(config, embedding.dtype)
        stream, first = embed(flat, embedding, self._layers[0].input_norm, scale)
        rotations = self._rotations(inputs, rope, cache)
        x: Activation | None = first
        for index in range(len(self._layers)):
            assert x is not None  # None only before a head that is not packed, after the last layer
            x = self._run(index, x, stream, inputs, rotations, cache)
        stream = stream.view(sequences, new, -1)
        if inputs.hidden is not None:
            inputs.hidden.rows = self._model.norm(stream)
        logits = self._logits(x, stream, inputs, last)
        scaled = config.logit_scale != 1.0 or config.logit_softcap is not None
        return finish_logits(logits, config) if scaled else logits

    def run_layer(
        self,
        layer: int,
        stream: Tensor,
        inputs: StepInput,
        rope: Rope,
        cache: KVCache,
        router_scores: Tensor | None = None,
    ) -> Tensor:
        """Run one layer as `LayeredStep.run_layer`."""
        # The rows of the stream are the embeddings of as many tokens: the operand of the first product is made there.
        rows = torch.arange(len(stream), device=stream.device)
        after, x = embed(rows, stream.contiguous(), self._layers[layer].input_norm)
        self._run(layer, x, after, inputs, self._rotations(inputs, rope, cache), cache, router_scores)
        return after

    def _rotations(self, inputs: StepInput, rope: Rope, cache: KVCache) -> Mapping[RopeSpec, Rotation]:
        tables = rope.every(min(inputs.block_table.shape[1] * cache.block_size, rope.positions))
        assert tables is not None  # checked by `CudaPass.takes`
        return {
            spec: Rotation(table.cos, table.sin, table.interleaved, table.query_scale) for spec, table in tables.items()
        }

    def _run(
        self,
        index: int,
        x: Activation,
        stream: Tensor,
        inputs: StepInput,
        rotations: Mapping[RopeSpec, Rotation],
        cache: KVCache,
        router_scores: Tensor | None = None,
    ) -> Activation | None:
        layer, counters = self._layers[index], self._counters
        lengths, block_table, counts = inputs.lengths, inputs.table_of(cache.windowed(index)), inputs.counts
        keys, values = cache.all(index)
        stored = LayerCache(keys.data, values.data, keys.scales, values.scales)
        qkv, rotation = layer.input_norm.product, None if layer.rope is None else rotations[layer.rope]
        query = project(
            x, qkv, layer.projection, rotation, lengths, block_table, stored, stream.dtype, counters, counts
        )
        attended = decode_attention(query, stored, lengths, block_table, layer.scoring, layer.o, counters, counts)
        norm = self._next_norms[index]
        return layer.mlp.add_to(attended, layer.o, layer.residual, stream, norm, counters, router_scores)

    def _logits(self, x: Activation | None, stream: Tensor, inputs: StepInput, last: bool) -> Tensor:
        # The head is a tenth of a model: of a prompt it multiplies the last row alone, normed by an operation of its
        # own, rather than all rows.
        if self._head is None or x is None or (last and inputs.counts is not None):
            logits: Tensor = self._model.head(self._model.norm(inputs.last_rows(stream) if last else stream))
            return logits
        logits = self._head.multiply(x, stream.dtype).view(*stream.shape[:2], -1)
        return logits[:, -1:] if last else logits
