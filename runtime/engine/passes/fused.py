"""The fused GPU pass: decoding of up to 256 sequences and verification of drafts by fused Triton kernels.

The plain pass launches some forty operations a layer. Here a layer is four products and attention, five launches that
also do what follows them, or ten to thirteen in a mixture of experts, and nothing passes through the host. Values are
rounded where the plain pass rounds them, except for the output of a norm (`triton.residual`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.graphs import StepInput, longest
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.routed import decline_routing
from mycli.runtime.kernels.triton.attention import decode_attention, head_fits
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
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.streamed_experts import StreamedExperts
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import MOST_ROWS
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec


class SecondHalf(Protocol):
    def largest(self) -> int: ...

    def add_to(
        self, attended: Activation, o: TritonMatmul, stream: Tensor, next_norm: Norm | None, counters: Tensor
    ) -> Activation | None:
        """Add the product with `o`, and then this half, to the stream [rows, size]; return it normed by `next_norm`.

        counters: as in `residual.add`.
        """
        ...


@dataclass(frozen=True)
class _DenseMlp:
    norm: Norm
    down: TritonMatmul

    def largest(self) -> int:
        return max(self.norm.product.n, self.down.n)

    def add_to(
        self, attended: Activation, o: TritonMatmul, stream: Tensor, next_norm: Norm | None, counters: Tensor
    ) -> Activation | None:
        normed = add(attended, o, stream, self.norm, counters)
        assert normed is not None
        active = activate(normed, self.norm.product, stream.dtype, self.down, counters)
        return add(active, self.down, stream, next_norm, counters)


@dataclass(frozen=True)
class _Layer:
    input_norm: Norm
    o: TritonMatmul
    second: SecondHalf
    projection: Projection
    window: int | None

    def largest(self) -> int:
        return max(self.input_norm.product.n, self.o.n, self.second.largest())


def _matmul(linear: Linear) -> TritonMatmul | None:
    return linear.matmul if isinstance(linear.matmul, TritonMatmul) else None


def _matmuls(linears: Mapping[str, Linear]) -> dict[str, TritonMatmul] | Declined:
    matmuls: dict[str, TritonMatmul] = {}
    for name, linear in linears.items():
        matmul = _matmul(linear)
        if matmul is None:
            return Declined("not-one-packed-product", {"linear": linear.specs[0].name})
        if name != "qkv" and linear.bias is not None:
            return Declined("linear-bias", {"linear": linear.specs[0].name})
        matmuls[name] = matmul
    return matmuls


def _dense_mlp(mlp: Mlp) -> SecondHalf | Declined:
    matmuls = _matmuls({"gate_up": mlp.gate_up, "down": mlp.down})
    if isinstance(matmuls, Declined):
        return matmuls
    assert mlp.norm is not None  # checked by `decline_config`
    return _DenseMlp(Norm(mlp.norm.weight, mlp.norm.eps, matmuls["gate_up"]), matmuls["down"])


def _mixture(experts: Experts) -> SecondHalf | Declined:
    if isinstance(experts, StreamedExperts):
        return Declined("streamed-experts")
    gate_up, down = (
        ExpertTable.from_weights([linear.matmul for linear in linears]) for linears in (experts.gate_up, experts.down)
    )
    if isinstance(gate_up, Declined) or isinstance(down, Declined):
        return Declined("mixed-experts")
    router, gate = (None if linear is None else linear.matmul for linear in (experts.router, experts.shared_gate))
    if not isinstance(router, DenseMatmul) or not isinstance(gate, DenseMatmul | None):
        return Declined("packed-router", {"linear": experts.spec.router.name})
    shared = None
    if experts.shared is not None:
        matmuls = _matmuls({"gate_up": experts.shared.gate_up, "down": experts.shared.down})
        if isinstance(matmuls, Declined):
            return matmuls
        if matmuls["gate_up"].packing != gate_up.weights[0].packing:
            return Declined("shared-expert-packing", {"linear": experts.shared.gate_up.specs[0].name})
        shared = SharedExpert(matmuls["gate_up"], matmuls["down"], None if gate is None else gate.dequantize())
    assert experts.norm is not None  # as above
    norm = Norm(experts.norm.weight, experts.norm.eps, gate_up.weights[0])
    return FusedMixture(norm, router.dequantize(), experts.spec.routing, experts.correction, gate_up, down, shared)


def _layer(block: Block) -> _Layer | Declined:
    attention, mlp = block.mixer, block.mlp
    assert isinstance(attention, Attention) and attention.norm is not None and mlp is not None  # as above
    matmuls = _matmuls({"qkv": attention.qkv, "o": attention.o})
    if isinstance(matmuls, Declined):
        return matmuls
    second = _mixture(mlp) if isinstance(mlp, Experts) else _dense_mlp(mlp)
    if isinstance(second, Declined):
        return second
    projection = Projection(
        attention.spec.heads,
        attention.qkv.bias,
        None if attention.q_norm is None else attention.q_norm.weight,
        None if attention.k_norm is None else attention.k_norm.weight,
        attention.norm.eps if attention.q_norm is None else attention.q_norm.eps,
    )
    normed = Norm(attention.norm.weight, attention.norm.eps, matmuls["qkv"])
    return _Layer(normed, matmuls["o"], second, projection, attention.spec.window)


class FusedStep:
    """The fused pass of one model; see `compile`."""

    def __init__(self, model: Transformer, layers: tuple[_Layer, ...]) -> None:
        self._model, self._layers = model, layers
        self._head = _matmul(model.head)
        final = None if self._head is None else Norm(model.norm.weight, model.norm.eps, self._head)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), final)
        # More than any launch has pieces; each leaves them zero. One array: launches follow each other.
        pieces = (MOST_ROWS // 16) * max(layer.largest() for layer in layers) // 16 + MOST_ROWS * model.config.kv_heads
        self._counters = torch.zeros(pieces, dtype=torch.int32, device=model.device)

    @classmethod
    def compile(cls, model: Transformer) -> "FusedStep | Declined":
        """Build the fused pass of a loaded model, or return why it has none."""
        if model.dtype not in (torch.bfloat16, torch.float16):
            dtype = str(model.dtype).removeprefix("torch.")
            return Declined("activation-dtype", {"dtype": dtype})
        declined = decline_config(model.config)
        if declined is not None:
            return declined
        layers = []
        for block in model.layers():
            layer = _layer(block)
            if isinstance(layer, Declined):
                return layer
            layers.append(layer)
        return cls(model, tuple(layers))

    def takes(self, sequences: int, tokens: int) -> bool:
        """Return whether the kernels do a pass over `tokens` new tokens of each of `sequences`."""
        config, chip = self._model.config, self._layers[0].o.chip
        group, element = config.heads // config.kv_heads, self._model.dtype.itemsize
        # Packed codes need no more shared memory than values of the model's dtype.
        return sequences * tokens <= MOST_ROWS and head_fits(chip, group, config.head_dim, tokens, element)

    def rotates(self, rope: Rope, positions: int) -> bool:
        return rope.fixed(positions) is not None

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        """Return logits [sequences, 1 if last else new, vocab] in the model's dtype; the cache takes keys and values.

        Logits of padding sequences mean nothing.
        """
        tables = rope.fixed(longest(inputs.block_table, rope, cache))
        assert tables is not None  # checked by `rotates`
        sequences, new = inputs.tokens.shape
        counters, lengths, block_table = self._counters, inputs.lengths, inputs.block_table
        stream, first = embed(inputs.tokens.reshape(-1).contiguous(), self._model.embedding, self._layers[0].input_norm)
        x: Activation | None = first
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            assert x is not None  # only a head that is not packed has no operand
            keys, values = cache.all(index)
            stored = LayerCache(keys.data, values.data, keys.scales, values.scales)
            qkv = layer.input_norm.product
            query = project(x, qkv, layer.projection, tables, lengths, block_table, stored, stream.dtype, counters)
            attended = decode_attention(query, stored, lengths, block_table, layer.window, layer.o, counters)
            x = layer.second.add_to(attended, layer.o, stream, next_norm, counters)
        return self._logits(x, stream.view(sequences, new, -1), last)

    def _logits(self, x: Activation | None, stream: Tensor, last: bool) -> Tensor:
        if self._head is None or x is None:
            logits: Tensor = self._model.head(self._model.norm(stream[:, -1:] if last else stream))
            return logits
        logits = self._head.multiply(x, stream.dtype).view(*stream.shape[:2], -1)
        return logits[:, -1:] if last else logits


def _decline_layer(spec: LayerSpec) -> Declined | None:
    if spec.recurrent is not None:
        return Declined("layer-recurrent")
    if spec.latent is not None:
        return Declined("latent-attention")
    if spec.mixer is None or spec.mlp is None:
        return Declined("layer-parts")
    attention, mlp = spec.attention, spec.mlp
    if attention.sinks is not None:
        return Declined("attention-sinks")
    if attention.gated or attention.gate is not None:
        return Declined("gated-attention")
    if attention.chunk is not None:
        return Declined("attention-chunks")
    if len(spec.parts) != 2 or attention.kv_source is not None:
        return Declined("layer-parts")
    if spec.parallel or attention.norm is None or mlp.norm is None:
        return Declined("no-input-norm")
    if attention.output_norm is not None or mlp.output_norm is not None:
        return Declined("output-norm")
    if any(norm.offset or norm.layer_norm for norm in spec.norms()):
        return Declined("norm-kind")
    if any(norm is not None and norm.size != attention.head_dim for norm in (attention.q_norm, attention.k_norm)):
        return Declined("norm-all-heads")
    if (
        attention.v_norm is not None
        or attention.inner_norm is not None
        or attention.value_dim is not None
        or attention.value_scale != 1.0
        or attention.norm_after_rope
        or attention.clip is not None
        or not attention.has_v_proj
    ):
        return Declined("key-value-kind")
    if (
        attention.rope is None
        or attention.rope.interleaved
        or attention.rope.clockwise
        or attention.rope.dim != attention.head_dim
    ):
        return Declined("rotation-kind")
    if attention.rope.scaling.query_beta:
        return Declined("query-scale")
    if attention.scale not in (None, attention.head_dim**-0.5) or attention.softcap is not None:
        return Declined("score-kind")
    if (
        mlp.activation != "silu"
        or {attention.residual_scale, mlp.residual_scale} != {1.0}
        or spec.layer_scalar is not None
    ):
        return Declined("activation-or-multiplier")
    return _decline_experts(mlp) if isinstance(mlp, ExpertsSpec) else None


def _decline_experts(spec: ExpertsSpec) -> Declined | None:
    if spec.weigh_inputs:
        return Declined("expert-inputs")
    if (declined := decline_routing(spec.routing)) is not None:
        return declined
    if any((spec.router_norm, spec.expert_norm, spec.expert_output_norm)):
        return Declined("expert-norms")
    if spec.shared is not None and (spec.shared.mlp.norm or spec.shared.mlp.output_norm):
        return Declined("shared-expert-norms")
    if spec.routing.groups > 1:
        return Declined("expert-groups")
    if spec.expert_scales is not None or any(linear.bias for linear in spec.unquantized):
        return Declined("router-bias")
    if any(linear.bias for linear in spec.experts[0].linears):
        return Declined("expert-biases")
    return None


def decline_config(config: ModelConfig) -> Declined | None:
    """Return what in the declaration of a model the fused kernels do not do; None if they do all of it."""
    for spec in config.layer_specs:
        if (declined := _decline_layer(spec)) is not None:
            return declined
    if config.head_bias:
        return Declined("linear-bias", {"linear": config.head().name})
    if config.embedding_norm:
        return Declined("norm-kind")
    if config.embedding_scale != 1.0 or config.logit_scale != 1.0 or config.logit_softcap is not None:
        return Declined("embedding-or-logit-scale")
    if config.norm_offset or config.layer_norm:
        return Declined("norm-kind")
    shapes = {(spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) for spec in config.layer_specs}
    if len(shapes) > 1 or len(config.distinct_ropes) > 1:
        return Declined("layers-differ")
    return None
