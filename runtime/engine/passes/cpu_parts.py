"""The layer parts, norms and products of a loaded model as the structures of the native CPU code (layer.h, chain.h).

Structures hold addresses of weights, so they are built once, after loading. `native_part` returns `Declined` for what
the native code does not take.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_float, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import native_window
from mycli.runtime.kernels.cpu.elementwise import GATE_TYPES
from mycli.runtime.kernels.cpu.experts import DENSE_WEIGHTS, PACKED_WEIGHTS, TABLE_WEIGHTS, c_choice
from mycli.runtime.kernels.cpu.layer import (
    MAX_PRODUCTS,
    CAttentionPart,
    CChannelDeltaPart,
    CConvolutionPart,
    CDeltaPart,
    CExpertProduct,
    CExpertsPart,
    CFeedForward,
    CHead,
    CLatentPart,
    CLinear,
    CMambaPart,
    CMlpPart,
    CNormParams,
    CParallelMixersPart,
    CParallelPart,
    CPart,
    CPerLayerPart,
    CProduct,
    CResidualAdd,
    Fetch,
    pointer,
)
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.routed import decline_routing
from mycli.runtime.layers.block import AlternatingUpdates, Attention, BlockPart, Parallel, PerLayer, Recurrent
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.layer_part import LayerPart
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.recurrent import Convolution, DeltaNet, KimiDelta, Mamba, ShortConv
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import PerLayerSpec
from mycli.runtime.models.part_spec import MlpSpec
from mycli.runtime.quantization.packed_weight import Matmul

if TYPE_CHECKING:
    from mycli.runtime.layers.streamed_experts import StreamedExperts


class _NotNativeError(Exception):
    """Carries the `Declined` out of the functions below; it does not leave this file."""

    def __init__(self, declined: Declined) -> None:
        super().__init__(declined.code)
        self.declined = declined


def _require(declined: Declined | None) -> None:
    if declined is not None:
        raise _NotNativeError(declined)


def native_part(part: BlockPart) -> CPart | Declined:
    """Build the structure of `part`, which must not be freed while the structure is used."""
    try:
        return _part(part)
    except _NotNativeError as error:
        return error.declined


def native_head(norm: RMSNorm, head: Linear) -> CHead | Declined:
    """Build the structure of the last norm and the head."""
    try:
        return CHead(_gain(norm), _linear(head))
    except _NotNativeError as error:
        return error.declined


def _part(part: BlockPart) -> CPart:
    match part:
        case Attention():
            return _attention(part)
        case LatentAttention():
            return _latent(part)
        case Mlp():
            return _mlp(part)
        case Experts():
            return _experts(part)
        case Parallel(other=Mlp() as mlp):
            return CParallelPart(_attention(part.attention), _mlp(mlp))
        case Parallel(other=Recurrent(mixer=Mamba() as mixer) as other):
            return CParallelMixersPart(_attention(part.attention), _mamba(other, mixer))
        case Parallel(other=Experts()):
            raise _NotNativeError(Declined("parallel-experts"))
        case Parallel():
            raise _NotNativeError(Declined("parallel-mixers"))
        case AlternatingUpdates():
            raise _NotNativeError(Declined("several-streams"))
        case PerLayer():
            width = _vectors(part.spec.gate.out_features, "per_layer_width")
            products = _linear(part.gate), _linear(part.projection)
            first = part.layer * width
            return CPerLayerPart(_gain(part.norm), *products, _sum(part), first, width, _gate_type(part.spec))
        case Recurrent(mixer=DeltaNet() as mixer):
            return _delta_net(part, mixer)
        case Recurrent(mixer=KimiDelta() as mixer):
            return _kimi_delta(part, mixer)
        case Recurrent(mixer=Mamba() as mixer):
            return _mamba(part, mixer)
        case Recurrent(mixer=ShortConv() as mixer):
            spec = mixer.spec.convolution
            products = _linear(mixer.projection), _linear(mixer.out)
            weights = _convolution(mixer.convolution)
            return CConvolutionPart(
                _gain(part.norm), *products, _sum(part), *weights, channels=spec.channels, taps=spec.taps
            )
    raise _NotNativeError(Declined("unknown-part", {"part": type(part).__name__}))


def _attention(part: Attention) -> CAttentionPart:
    spec, rope = part.spec, part.spec.rope
    if spec.clip is not None:
        raise _NotNativeError(Declined("clipped-attention", {"clip": spec.clip}))
    if spec.gate is not None:
        raise _NotNativeError(Declined("attention-gate", {"linear": spec.gate.linear.name}))
    if spec.differential is not None:
        raise _NotNativeError(Declined("differential-attention"))
    if spec.key_bias is not None:
        raise _NotNativeError(Declined("key-biases"))
    if spec.value_dim is not None or spec.value_scale != 1.0 or spec.inner_norm is not None:
        raise _NotNativeError(Declined("attention-values"))
    return CAttentionPart(
        *(_gain(norm) for norm in (part.norm, part.q_norm, part.k_norm, part.v_norm)),
        _linear(part.qkv),
        _linear(part.o),
        _sum(part),
        pointer(part.sinks),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=_vectors(spec.head_dim, "head_dim"),
        half=0 if rope is None else _vectors(rope.dim // 2, "half of the rotary dimensions"),
        window=native_window(spec.window, spec.chunk),
        scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
        softcap=spec.softcap or 0.0,
        interleaved=rope is not None and rope.interleaved,
        norms_rotated=spec.norm_after_rope,
        makes_keys=spec.kv_source is None,
        makes_values=spec.has_v_proj,
        gated=spec.gated,
    )


def _latent(part: LatentAttention) -> CLatentPart:
    from mycli.runtime.kernels.cpu.latent import decline_latent

    spec, weight = part.spec, part.absorbed
    _require(decline_latent(spec.rank, spec.rope_dim))
    for tensor in (weight.keys, weight.values):
        if tensor.dtype != torch.bfloat16 or tensor.shape[2] % 32:
            raise _NotNativeError(Declined("dense-weight", {"dtype": str(tensor.dtype), "inputs": tensor.shape[2]}))
    if spec.rope is not None:
        _vectors(spec.rope_dim // 2, "half of the rotary dimensions")
    _vectors(spec.heads * spec.head_dim, "the width of all queries")
    if spec.gate is not None:
        _vectors(spec.value_dim, "v_head_dim")
    return CLatentPart(
        *(_gain(norm) for norm in (part.norm, part.q_norm, part.kv_norm)),
        _linear(part.inputs),
        CLinear() if part.q_b is None else _linear(part.q_b),
        CLinear() if part.gate is None else _linear(part.gate),
        _linear(part.o),
        _sum(part),
        pointer(weight.keys),
        pointer(weight.values),
        heads=spec.heads,
        rank=spec.rank,
        nope=spec.nope_dim,
        rope=spec.rope_dim,
        value=spec.value_dim,
        rotates=spec.rope is not None,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        scale=spec.scale,
    )


def _gate_type(spec: MlpSpec | ExpertsSpec | PerLayerSpec) -> int:
    """Return `GateType` of steps.h."""
    key = spec.activation, isinstance(spec, PerLayerSpec) or spec.gated
    if key not in GATE_TYPES:
        raise _NotNativeError(Declined("activation", {"activation": spec.activation}))
    return GATE_TYPES[key]


def _mlp(part: Mlp) -> CMlpPart:
    return CMlpPart(_gain(part.norm), _feed(part.spec, part), _sum(part))


def _feed(spec: MlpSpec, mlp: Mlp) -> CFeedForward:
    if spec.inner_norm is not None:
        raise _NotNativeError(Declined("mlp-norm"))
    if spec.sparsity:
        raise _NotNativeError(Declined("gate-threshold"))
    size = _vectors(spec.size, "intermediate_size")
    return CFeedForward(_linear(mlp.gate_up), _linear(mlp.down), size, _gate_type(spec), spec.gate_scale)


def _require_delta(mixer: DeltaNet | KimiDelta) -> None:
    from mycli.runtime.kernels.cpu.recurrent import decline_delta

    _require(decline_delta(mixer.sizes))
    if mixer.norm.weight.dtype != torch.bfloat16:
        raise _NotNativeError(Declined("gain-dtype", {"dtype": str(mixer.norm.weight.dtype)}))


def _delta_net(part: Recurrent, mixer: DeltaNet) -> CDeltaPart:
    _require_delta(mixer)
    spec = mixer.spec
    return CDeltaPart(
        _gain(part.norm),
        _gain(mixer.norm),
        *(_linear(linear) for linear in (mixer.projection, mixer.gates, mixer.out)),
        _sum(part),
        *_convolution(mixer.convolution),
        pointer(mixer.rate),
        pointer(mixer.dt_bias),
        taps=spec.convolution.taps,
        heads=spec.heads,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        by_key_head=spec.by_key_head,
        beta_scale=spec.beta_scale,
    )


def _kimi_delta(part: Recurrent, mixer: KimiDelta) -> CChannelDeltaPart:
    _require_delta(mixer)
    spec = mixer.spec
    raised = (CLinear() if linear is None else _linear(linear) for linear in (mixer.decay_b, mixer.gate_b))
    return CChannelDeltaPart(
        _gain(part.norm),
        _gain(mixer.norm),
        *(_linear(mixer.projection), _linear(mixer.gates), *raised, _linear(mixer.out)),
        _sum(part),
        *_convolution(mixer.convolution),
        pointer(mixer.rate),
        pointer(mixer.dt_bias),
        taps=spec.convolution.taps,
        heads=spec.heads,
        head_dim=spec.head_dim,
        floor=spec.floor,
    )


def _mamba(part: Recurrent, mixer: Mamba) -> CMambaPart:
    from mycli.runtime.kernels.cpu.recurrent import decline_scan

    spec, low_high = mixer.spec, mixer.sizes.limits
    _require(decline_scan(mixer.sizes))
    if spec.norm_first:
        raise _NotNativeError(Declined("mamba-gate"))
    if mixer.norm is not None:
        if mixer.norm.weight.dtype != torch.bfloat16:
            raise _NotNativeError(Declined("gain-dtype", {"dtype": str(mixer.norm.weight.dtype)}))
        _vectors(spec.inner // spec.norm_groups, "the width of a norm")
    multipliers = torch.tensor(spec.multipliers or (1.0,) * 5, dtype=torch.bfloat16).tolist()
    return CMambaPart(
        _gain(part.norm),
        _gain(mixer.norm),
        *(_linear(linear) for linear in (mixer.projection, mixer.out)),
        _sum(part),
        *_convolution(mixer.convolution),
        *(pointer(tensor) for tensor in (mixer.rate, mixer.dt_bias, mixer.skip)),
        taps=spec.convolution.taps,
        heads=spec.heads,
        groups=spec.groups,
        head_dim=spec.head_dim,
        state_dim=spec.state_dim,
        norm_groups=spec.norm_groups,
        low=low_high[0],
        high=low_high[1],
        multipliers=(c_float * 5)(*multipliers),
    )


def _convolution(convolution: Convolution) -> tuple[int | None, int | None]:
    from mycli.runtime.kernels.cpu.recurrent import decline_convolution

    taps, channels = convolution.weight.shape
    _require(decline_convolution(channels, taps))
    return pointer(convolution.weight), pointer(convolution.bias)


def _vectors(count: int, field: str) -> int:
    """Return `count`; it must be a multiple of the vector length."""
    if count % LANES:
        raise _NotNativeError(Declined("vector-multiple", {"field": field, "count": count, "multiple": LANES}))
    return count


def _gain(norm: RMSNorm | None) -> CNormParams:
    if norm is None:
        return CNormParams()
    gain = norm.weight
    if norm.spec.heads:
        raise _NotNativeError(Declined("norm-by-head"))
    if gain.dtype not in ROW_TYPES or not gain.is_contiguous():
        raise _NotNativeError(Declined("gain-dtype", {"dtype": str(gain.dtype)}))
    size = _vectors(gain.shape[0], "the width of a norm")
    return CNormParams(gain.data_ptr(), pointer(norm.bias), size, norm.eps, ROW_TYPES[gain.dtype], norm.spec.layer_norm)


def _product(matmul: Matmul) -> CProduct:
    if isinstance(matmul, CpuMatmul):
        return CProduct(matmul.address, None, *matmul.shape)
    if not isinstance(matmul, DenseMatmul):
        raise _NotNativeError(Declined("weight-format", {"format": type(matmul).__name__}))
    weight = matmul.dequantize()
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] % 32:
        raise _NotNativeError(Declined("dense-weight", {"dtype": str(weight.dtype), "inputs": weight.shape[1]}))
    return CProduct(None, weight.data_ptr(), *weight.shape)


def _linear(linear: Linear) -> CLinear:
    if not 0 < len(linear.matmuls) <= MAX_PRODUCTS:
        raise _NotNativeError(Declined("product-parts", {"count": len(linear.matmuls), "most": MAX_PRODUCTS}))
    parts = [_product(matmul) for matmul in linear.matmuls]
    return CLinear((CProduct * MAX_PRODUCTS)(*parts), len(parts), linear.out_features, _bias(linear))


def _bias(linear: Linear) -> int | None:
    bias = linear.bias
    if bias is not None and bias.dtype != torch.bfloat16:
        raise _NotNativeError(Declined("bias-dtype", {"dtype": str(bias.dtype)}))
    if bias is not None:
        _vectors(linear.out_features, "the width of a bias")
    return pointer(bias)


def _sum(part: LayerPart) -> CResidualAdd:
    scalar, hidden = part.scalar, part.products[-1].out_features
    if part.gain is not None:
        raise _NotNativeError(Declined("residual-gains"))
    if scalar is not None and scalar.dtype != torch.bfloat16:
        raise _NotNativeError(Declined("scalar-dtype", {"dtype": str(scalar.dtype)}))
    return CResidualAdd(_gain(part.output_norm), pointer(scalar), _vectors(hidden, "hidden_size"), part.residual)


@dataclass(frozen=True)
class _ExpertWeights:
    """The weights of one expert; `layout` must be the same for all experts of a product."""

    address: int
    bias: int | None
    storage: int
    outputs: int
    inputs: int
    layout: object


def _expert_weights(linear: Linear) -> _ExpertWeights:
    matmul, bias = linear.matmul, _bias(linear)
    if isinstance(matmul, TableMatmul):
        layout: object = (TABLE_WEIGHTS, matmul.form, bias is None)
        return _ExpertWeights(matmul.address, bias, TABLE_WEIGHTS, *matmul.shape, layout)
    product = _linear(linear)
    if product.count > 1:
        raise _NotNativeError(Declined("expert-parts", {"count": product.count}))
    first = product.parts[0]
    if isinstance(matmul, CpuMatmul):
        layout = (PACKED_WEIGHTS, matmul.form, bias is None)
        return _ExpertWeights(first.packed, bias, PACKED_WEIGHTS, first.outputs, first.inputs, layout)
    layout = (DENSE_WEIGHTS, first.outputs, first.inputs, bias is None)
    return _ExpertWeights(first.dense, bias, DENSE_WEIGHTS, first.outputs, first.inputs, layout)


def _expert_product(linears: Sequence[Linear], streamed: bool) -> CExpertProduct:
    """Build the product of all experts; of streamed ones from those in memory, the others being set when read."""
    present = [expert for expert, linear in enumerate(linears) if linear.matmuls or not streamed]
    weights = [_expert_weights(linears[expert]) for expert in present]
    if len({weight.layout for weight in weights}) > 1:
        raise _NotNativeError(Declined("mixed-experts"))
    first = weights[0]
    addresses, biases = ((c_void_p * len(linears))() for _ in range(2))
    for expert, weight in zip(present, weights, strict=True):
        addresses[expert], biases[expert] = weight.address, weight.bias
    return CExpertProduct(addresses, biases, first.outputs, first.inputs, first.storage)


def _experts(part: Experts) -> CExpertsPart:
    from mycli.runtime.layers.streamed_experts import StreamedExperts

    spec, streamed = part.spec, isinstance(part, StreamedExperts)
    if isinstance(part, StreamedExperts) and not part.uniform:
        raise _NotNativeError(Declined("mixed-experts"))
    _require(decline_routing(spec.routing))
    if spec.weigh_inputs:
        raise _NotNativeError(Declined("expert-inputs"))
    if part.enter is not None:
        raise _NotNativeError(Declined("expert-projections"))
    shared = part.shared
    norms = [part.norm, part.router_norm, part.expert_norm, part.expert_output_norm]
    norms += [None, None] if shared is None else [shared.norm, shared.output_norm]
    structure = CExpertsPart(
        *(_gain(norm) for norm in norms),
        _linear(part.router),
        _expert_product(part.gate_up, streamed),
        _expert_product(part.down, streamed),
        CFeedForward() if shared is None else _feed(shared.spec, shared),
        CLinear() if part.shared_gate is None else _linear(part.shared_gate),
        _sum(part),
        pointer(part.scales),
        c_choice(spec.routing, part.correction),
        len(spec.experts),
        _vectors(spec.size, "moe_intermediate_size"),
        _gate_type(spec),
    )
    if isinstance(part, StreamedExperts):
        fetch = Fetch(lambda hit: _fetch(structure, part, hit))
        structure.fetch, structure.fetcher = fetch.function, fetch
    return structure


def _fetch(structure: CExpertsPart, part: "StreamedExperts", hit: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield positions in `hit` of experts that are in memory, their addresses set in `structure`."""
    for positions in part.pieces(hit):
        for expert in (hit[position] for position in positions):
            for product, linear in ((structure.gate_up, part.gate_up[expert]), (structure.down, part.down[expert])):
                weight = _expert_weights(linear)
                product.weights[expert], product.biases[expert] = weight.address, weight.bias
        yield positions
