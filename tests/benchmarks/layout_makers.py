"""Quantizes weights to nearest with the packages that define the layouts.

For each layout it yields the section of config.json and the tensors of a weight. Groups are of 32 where a layout allows
a choice; scales come from the largest weight or the range, as in the packages' simplest code. auto-round, bitsandbytes
and mlx are not test dependencies: a layout whose package is missing is skipped; compressed-tensors is installed. No
package that runs here writes block FP8: its tensors follow the description in docs/format.md.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import pack as pack_words
from mycli.runtime.quantization.packed_weight import unpack as unpack_words
from tests.support.foreign_layouts import mlx_tensor

GROUP = 32
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Made:
    """Describes a layout: name, package, section of config.json, and the tensors that replace a weight [N, K]."""

    name: str
    maker: str
    section: dict[str, Any]
    pack: Callable[[Tensor], Parts]
    embedding: bool = False  # whether the package quantizes the embedding too


def grouped(weight: Tensor, group: int) -> Tensor:
    return weight.float().view(weight.shape[0], -1, group)


def largest(weight: Tensor, group: int | None) -> Tensor:
    """Return the largest magnitude of each group, fp32 [N, K / group]; of each row without groups."""
    return grouped(weight, group or weight.shape[1]).abs().amax(-1).clamp(min=1e-8)


def ranged(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, both fp32 [N, K / group], that cover the range of each group including 0.

    No zero point is 0, which version 1 of GPTQ's layout cannot store.
    """
    values, top = grouped(weight, group), (1 << bits) - 1
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    scales = ((high - low) / top).clamp(min=1e-6).half().float()
    return scales, (-low / scales).round().clamp(1, top)


def _gptq(weight: Tensor, layer: Any, bits: int, ordered: bool) -> Parts:
    """Pack with AutoRound's torch layer; `ordered` stores the group indices of a permuted column order."""
    rows, columns = weight.shape
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0)) if ordered else torch.arange(columns)
    shown = weight.float()[:, order]
    scales, zeros = ranged(shown, bits, GROUP)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = shown
    packed = layer(bits, GROUP, columns, rows, False, g_idx=True)
    packed.device = torch.device("cpu")  # read by the layer of version 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about how it copies its zero points
        packed.pack(linear, scales, zeros)
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    if ordered:
        back = order.argsort()
        codes = unpack_words(parts["qweight"].t().contiguous(), bits, columns)[:, back].contiguous()
        parts |= {"qweight": pack_words(codes, bits).t(), "g_idx": parts["g_idx"][back]}
    return parts


def gptq() -> Iterator[Made]:
    """Yield both GPTQ versions, and one with a column order."""
    kinds = [("gptq", bits, False) for bits in (8, 4, 3, 2)] + [("gptq", 4, True), ("gptq_v2", 4, False)]
    for version, bits, ordered in kinds:
        module = "qlinear_torch_zp" if version == "gptq" else "qlinear_torch"
        layer = importlib.import_module(f"auto_round_extension.torch.{module}").QuantLinear
        section = {"quant_method": "gptq", "checkpoint_format": version, "bits": bits, "group_size": GROUP}
        section |= {"desc_act": ordered, "sym": False}
        name = f"{version} int{bits}-g{GROUP}" + (" in an order" if ordered else "")
        pack = partial(_gptq, layer=layer, bits=bits, ordered=ordered)
        yield Made(name, "auto-round", {"quantization_config": section}, pack)


def awq() -> Iterator[Made]:
    """Yield AWQ version gemm, packed by AutoRound's layer."""
    layer = importlib.import_module("auto_round.export.export_to_awq.utils").WQLinear_GEMM

    def pack(weight: Tensor) -> Parts:
        scales, zeros = ranged(weight, 4, GROUP)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.float()
        packed = layer.from_linear(linear, 4, GROUP, scales=scales.t(), zeros=zeros.t(), device="cpu")
        return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}

    section = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    yield Made(f"awq int4-g{GROUP}", "auto-round", {"quantization_config": section}, pack)


def fp8() -> Iterator[Made]:
    """Yield E4M3 with a scale for each block of 128 x 128, and with one scale per tensor."""

    def blocks(weight: Tensor) -> Parts:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        tiles = padded.view(padded.shape[0] // 128, 128, -1, 128)
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def whole(weight: Tensor) -> Parts:
        scale = weight.float().abs().amax() / 448
        return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale.view(1)}

    kinds: tuple[tuple[str, list[int] | None, Callable[[Tensor], Parts]], ...] = (
        ("blocks of 128x128", [128, 128], blocks),
        ("per tensor", None, whole),
    )
    for name, block, pack in kinds:
        section = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
        yield Made(f"fp8 {name}", "description", {"quantization_config": section}, pack)


def bitsandbytes() -> Iterator[Made]:
    """Yield NF4 and FP4 in blocks of 64, with and without double quantization, and LLM.int8."""
    import bitsandbytes.functional as maker

    def four(weight: Tensor, kind: str, nested: bool) -> Parts:
        codes, state = maker.quantize_4bit(weight.bfloat16(), blocksize=64, quant_type=kind, compress_statistics=nested)
        return {"weight": codes} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}

    def eight(weight: Tensor) -> Parts:
        codes, scales, _ = maker.int8_vectorwise_quant(weight.half())
        return {"weight": codes, "SCB": scales}

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
            section |= {"bnb_4bit_use_double_quant": nested}
            name = f"{kind}-g64" + (", double quantized" if nested else "")
            pack = partial(four, kind=kind, nested=nested)
            yield Made(name, "bitsandbytes", {"quantization_config": section}, pack)
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    yield Made("LLM.int8", "bitsandbytes", {"quantization_config": section}, eight)


def mlx() -> Iterator[Made]:
    """Yield affine groups and the three microscaling formats, with the embedding quantized too."""
    import mlx.core as mx

    def pack(weight: Tensor, **options: Any) -> Parts:
        parts = mx.quantize(mx.array(weight.float().numpy()).astype(mx.bfloat16), **options)
        return dict(zip(("weight", "scales", "biases"), map(mlx_tensor, parts), strict=False))

    kinds = [("affine", bits, GROUP) for bits in (8, 6, 5, 4, 3, 2)]
    for mode, bits, group in [*kinds, ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("mxfp4", 4, 32)]:
        options = {"group_size": group, "bits": bits, "mode": mode}
        name = f"mlx int{bits}-g{group}" if mode == "affine" else f"mlx {mode}"
        yield Made(name, "mlx", {"quantization": options}, partial(pack, **options), embedding=True)


def compressed_tensors() -> Iterator[Made]:
    """Yield codes packed in words and bytes, E4M3, and the three microscaling formats."""
    for bits in (8, 7, 6, 5, 4, 3, 2):
        yield _compressed(
            f"pack-quantized int{bits}-g{GROUP}-offset",
            "pack-quantized",
            partial(_with_zeros, bits=bits),
            num_bits=bits,
            strategy="group",
            group_size=GROUP,
            symmetric=False,
        )
    rows = {"num_bits": 8, "strategy": "channel"}
    yield _compressed("int-quantized, rows", "int-quantized", partial(_symmetric, top=127, group=None), **rows)
    top = partial(_symmetric, top=448, group=None)
    yield _compressed("float-quantized, rows", "float-quantized", top, **rows, type="float")
    nested = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    yield _compressed("nvfp4-pack", "nvfp4-pack-quantized", _nvfp4, **nested, type="float")
    powers = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "type": "float"}
    yield _compressed("mxfp4-pack", "mxfp4-pack-quantized", partial(_powers, top=6), **powers, num_bits=4)
    yield _compressed("mxfp8", "mxfp8-quantized", partial(_powers, top=448), **powers, num_bits=8)


def _compressed(name: str, layout: str, scales: Callable[[Tensor], Parts], **weights: Any) -> Made:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=layout)
    compressor = BaseCompressor.get_value_from_registry(layout)
    described = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json"), "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    section |= {"config_groups": {"group_0": described}}

    def pack(weight: Tensor) -> Parts:
        parts: Parts = compressor.compress({"weight": weight.clone(), **scales(weight)}, scheme)
        return parts

    return Made(name, "compressed-tensors", {"quantization_config": section}, pack)


def _with_zeros(weight: Tensor, bits: int) -> Parts:
    scales, zeros = ranged(weight, bits, GROUP)
    return {"weight_scale": scales.bfloat16(), "weight_zero_point": (zeros - (1 << bits - 1)).to(torch.int8)}


def _symmetric(weight: Tensor, top: int, group: int | None) -> Parts:
    return {"weight_scale": (largest(weight, group) / top).bfloat16()}


def _nvfp4(weight: Tensor) -> Parts:
    overall = (448 * 6 / weight.float().abs().max()).view(1)
    scales = (largest(weight, 16) / 6 * overall).to(torch.float8_e4m3fn).float()
    return {"weight_scale": scales, "weight_global_scale": overall}


def _powers(weight: Tensor, top: int) -> Parts:
    """Pack with the smallest power of two per group that reaches the largest weight."""
    return {"weight_scale": torch.exp2((largest(weight, 32) / top).log2().ceil()).bfloat16()}


MAKERS = (gptq, awq, fp8, bitsandbytes, mlx, compressed_tensors)
