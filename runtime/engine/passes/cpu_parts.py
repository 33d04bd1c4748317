"""The layer parts, norms and products of a loaded model as the structures of the native CPU code (layer.h, chain.h).

Structures hold addresses of weights, so they are built once, after loading. `native_part` returns `Declined` for what
the native code does not take.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_float, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mycli.runtime.engine.passes.cpu_structures import (
    NotNativeError,
    c_bias,
    c_feed,
    c_gate_type,
    c_linear,
    c_norm,
    c_residual,
    require_bf16_gain,
    require_native,
    whole_vectors,
)
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import native_window
from mycli.runtime.kernels.cpu.experts import (
    DENSE_WEIGHTS,
    PACKED_WEIGHTS,
    PORTABLE_WEIGHTS,
    TABLE_WEIGHTS,
    c_choice,
    decline_native_routing,
)
from mycli.runtime.kernels.cpu.layer import (
    CAttentionPart,
    CChannelDeltaPart,
    CConvolutionPart,
    CDeltaPart,
    CExpertProduct,
    CExpertsPart,
    CFeedForward,
    CHead,
    CLatentPart,
    CMambaPart,
    CMlpPart,
    CParallelMixersPart,
    CParallelPart,
    CPart,
    CPerLayerPart,
    CSelectivePart,
    Fetch,
)
from mycli.runtime.kernels.cpu.library.build import pointer
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.layers.block import AlternatingUpdates, Attention, BlockPart, Parallel, PerLayer, Recurrent
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.recurrent import Convolution, DeltaNet, KimiDelta, Mamba, Selective, ShortConv

if TYPE_CHECKING:
    from mycli.runtime.layers.streamed_experts import StreamedExperts


def native_part(part: BlockPart) -> CPart | Declined:
    """Build the structure of `part`, which must not be freed while the structure is used."""
    try:
        return _part(part)
    except NotNativeError as error:
        return error.declined


def native_head(norm: RMSNorm, head: Linear) -> CHead | Declined:
    """Build the structure of the last norm and the head."""
    try:
        return CHead(c_norm(norm), c_linear(head))
    except NotNativeError as error:
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
            if mlp.norm is not None:
                raise NotNativeError(Declined("parallel-norms"))
            return CParallelPart(_attention(part.attention), _mlp(mlp))
        case Parallel(other=Recurrent(mixer=Mamba() as mixer) as other):
            return CParallelMixersPart(_attention(part.attention), _mamba(other, mixer))
        case Parallel(other=Experts()):
            raise NotNativeError(Declined("parallel-experts"))
        case Parallel():
            raise NotNativeError(Declined("parallel-mixers"))
        case AlternatingUpdates():
            raise NotNativeError(Declined("several-streams"))
        case PerLayer():
            return _per_layer(part)
        case Recurrent(mixer=DeltaNet() as mixer):
            return _delta_net(part, mixer)
        case Recurrent(mixer=KimiDelta() as mixer):
            return _kimi_delta(part, mixer)
        case Recurrent(mixer=Mamba() as mixer):
            return _mamba(part, mixer)
        case Recurrent(mixer=Selective() as mixer):
            return _selective(part, mixer)
        case Recurrent(mixer=ShortConv() as mixer):
            return _short_conv(part, mixer)
    raise NotNativeError(Declined("unknown-part", {"part": type(part).__name__}))


def _attention(part: Attention) -> CAttentionPart:
    spec, rope = part.spec, part.spec.rope
    if spec.clip is not None:
        raise NotNativeError(Declined("clipped-attention", {"clip": spec.clip}))
    if spec.gate is not None:
        raise NotNativeError(Declined("attention-gate", {"linear": spec.gate.linear.name}))
    if spec.differential is not None:
        raise NotNativeError(Declined("differential-attention"))
    if spec.key_bias is not None:
        raise NotNativeError(Declined("key-biases"))
    if spec.value_dim is not None or spec.value_scale != 1.0 or spec.inner_norm is not None:
        raise NotNativeError(Declined("attention-values"))
    return CAttentionPart(
        *(c_norm(norm) for norm in (part.norm, part.q_norm, part.k_norm, part.v_norm)),
        c_linear(part.qkv),
        c_linear(part.o),
        c_residual(part),
        pointer(part.sinks),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=whole_vectors(spec.head_dim, "head_dim"),
        half=0 if rope is None else whole_vectors(rope.dim // 2, "half of the rotary dimensions"),
        window=native_window(spec.window, spec.chunk),
        scale=spec.softmax_scale,
        softcap=spec.softcap or 0.0,
        interleaved=rope is not None and rope.interleaved,
        norms_rotated=spec.norm_after_rope,
        makes_keys=spec.kv_source is None,
        makes_values=spec.has_v_proj,
        gated=spec.gated,
        portable=part.o.portable,
    )


def _latent(part: LatentAttention) -> CLatentPart:
    from mycli.runtime.kernels.cpu.latent import decline_latent

    spec, weight = part.spec, part.absorbed
    require_native(decline_latent(spec.rank, spec.rope_dim))
    for tensor in (weight.keys, weight.values):
        if tensor.dtype != torch.bfloat16 or tensor.shape[2] % 32:
            raise NotNativeError(Declined("dense-weight", {"dtype": str(tensor.dtype), "inputs": tensor.shape[2]}))
    if spec.rope is not None:
        whole_vectors(spec.rope_dim // 2, "half of the rotary dimensions")
    whole_vectors(spec.heads * spec.head_dim, "the width of all queries")
    if spec.gate is not None:
        whole_vectors(spec.value_dim, "v_head_dim")
    return CLatentPart(
        *(c_norm(norm) for norm in (part.norm, part.q_norm, part.kv_norm)),
        c_linear(part.inputs),
        *(c_linear(linear) for linear in (part.q_b, part.gate, part.o)),
        c_residual(part),
        pointer(weight.keys),
        pointer(weight.values),
        heads=spec.heads,
        rank=spec.rank,
        nope=spec.nope_dim,
        rope=spec.rope_dim,
        value=spec.value_dim,
        rotates=spec.rope is not None,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        portable=part.o.portable,
        scale=spec.scale,
    )


def _mlp(part: Mlp) -> CMlpPart:
    return CMlpPart(c_norm(part.norm), c_feed(part.spec, part), c_residual(part))


def _per_layer(part: PerLayer) -> CPerLayerPart:
    width = whole_vectors(part.spec.gate.out_features, "per_layer_width")
    products = c_linear(part.gate), c_linear(part.projection)
    first = part.layer * width
    return CPerLayerPart(c_norm(part.norm), *products, c_residual(part), first, width, c_gate_type(part.spec))


def _require_delta(mixer: DeltaNet | KimiDelta) -> None:
    from mycli.runtime.kernels.cpu.recurrent import decline_delta

    require_native(decline_delta(mixer.sizes))
    require_bf16_gain(mixer.norm)


def _delta_net(part: Recurrent, mixer: DeltaNet) -> CDeltaPart:
    _require_delta(mixer)
    spec = mixer.spec
    return CDeltaPart(
        c_norm(part.norm),
        c_norm(mixer.norm),
        *(c_linear(linear) for linear in (mixer.projection, mixer.gates, mixer.out)),
        c_residual(part),
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
    linears = mixer.projection, mixer.gates, mixer.decay_b, mixer.gate_b, mixer.out
    return CChannelDeltaPart(
        c_norm(part.norm),
        c_norm(mixer.norm),
        *map(c_linear, linears),
        c_residual(part),
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
    require_native(decline_scan(mixer.sizes))
    if spec.norm_first:
        raise NotNativeError(Declined("mamba-gate"))
    if mixer.norm is not None:
        require_bf16_gain(mixer.norm)
        whole_vectors(spec.inner // spec.norm_groups, "the width of a norm")
    multipliers = torch.tensor(spec.multipliers or (1.0,) * 5, dtype=torch.bfloat16).tolist()
    return CMambaPart(
        c_norm(part.norm),
        c_norm(mixer.norm),
        *(c_linear(linear) for linear in (mixer.projection, mixer.out)),
        c_residual(part),
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


def _short_conv(part: Recurrent, mixer: ShortConv) -> CConvolutionPart:
    spec = mixer.spec.convolution
    products = c_linear(mixer.projection), c_linear(mixer.out)
    weights = _convolution(mixer.convolution)
    return CConvolutionPart(
        c_norm(part.norm), *products, c_residual(part), *weights, channels=spec.channels, taps=spec.taps
    )


def _selective(part: Recurrent, mixer: Selective) -> CSelectivePart:
    from mycli.runtime.kernels.cpu.recurrent import decline_scan

    spec = mixer.spec
    require_native(decline_scan(mixer.sizes))
    return CSelectivePart(
        *(c_norm(norm) for norm in (part.norm, *(mixer.norms or (None,) * 3))),
        *(c_linear(linear) for linear in (mixer.projection, mixer.select, mixer.step, mixer.out)),
        c_residual(part),
        *_convolution(mixer.convolution),
        *(pointer(tensor) for tensor in (mixer.rate, mixer.dt_bias, mixer.skip)),
        taps=spec.convolution.taps,
        channels=spec.channels,
        state_dim=spec.state_dim,
    )


def _convolution(convolution: Convolution) -> tuple[int | None, int | None]:
    from mycli.runtime.kernels.cpu.recurrent import decline_convolution

    taps, channels = convolution.weight.shape
    require_native(decline_convolution(channels, taps))
    return pointer(convolution.weight), pointer(convolution.bias)


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
    matmul, bias = linear.matmul, c_bias(linear)
    if isinstance(matmul, TableMatmul):
        layout: object = (TABLE_WEIGHTS, matmul.form, bias is None)
        return _ExpertWeights(matmul.address, bias, TABLE_WEIGHTS, *matmul.shape, layout)
    product = c_linear(linear)
    if product.count > 1:
        raise NotNativeError(Declined("expert-parts", {"count": product.count}))
    first = product.parts[0]
    if isinstance(matmul, CpuMatmul):
        layout = (PACKED_WEIGHTS, matmul.form, bias is None)
        return _ExpertWeights(first.packed, bias, PACKED_WEIGHTS, first.outputs, first.inputs, layout)
    storage = PORTABLE_WEIGHTS if first.portable else DENSE_WEIGHTS
    layout = (storage, first.outputs, first.inputs, bias is None)
    return _ExpertWeights(first.dense, bias, storage, first.outputs, first.inputs, layout)


def _expert_product(linears: Sequence[Linear], streamed: bool) -> CExpertProduct:
    """Build the product of all experts; of streamed ones from those in memory, the others being set when read."""
    present = [expert for expert, linear in enumerate(linears) if linear.matmuls or not streamed]
    weights = [_expert_weights(linears[expert]) for expert in present]
    if len({weight.layout for weight in weights}) > 1:
        raise NotNativeError(Declined("mixed-experts"))
    first = weights[0]
    addresses, biases = ((c_void_p * len(linears))() for _ in range(2))
    for expert, weight in zip(present, weights, strict=True):
        addresses[expert], biases[expert] = weight.address, weight.bias
    return CExpertProduct(addresses, biases, first.outputs, first.inputs, first.storage)


def _experts(part: Experts) -> CExpertsPart:
    from mycli.runtime.layers.streamed_experts import StreamedExperts

    spec, streamed = part.spec, isinstance(part, StreamedExperts)
    if isinstance(part, StreamedExperts) and not part.uniform:
        raise NotNativeError(Declined("mixed-experts"))
    require_native(decline_native_routing(spec.routing))
    if spec.weigh_inputs:
        raise NotNativeError(Declined("expert-inputs"))
    if spec.early_router:
        raise NotNativeError(Declined("early-router"))
    if part.enter is not None:
        raise NotNativeError(Declined("expert-projections"))
    shared = part.shared
    norms = [part.norm, part.router_norm, part.expert_norm, part.expert_output_norm]
    norms += [None, None] if shared is None else [shared.norm, shared.output_norm]
    structure = CExpertsPart(
        *(c_norm(norm) for norm in norms),
        c_linear(part.router),
        _expert_product(part.gate_up, streamed),
        _expert_product(part.down, streamed),
        CFeedForward() if shared is None else c_feed(shared.spec, shared),
        c_linear(part.shared_gate),
        c_residual(part),
        pointer(part.scales),
        c_choice(spec.routing, part.correction),
        len(spec.experts),
        whole_vectors(spec.size, "moe_intermediate_size"),
        c_gate_type(spec),
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
