"""Writes folders of packed random weights in the layout of `quantize`, without quantizing anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.packed_weight import pack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields


def write_packed(folder: Path, fields: Mapping[str, Any], widths: Mapping[str, int], group: int = 32) -> Path:
    """Write a bf16 model of config.json `fields` with packed linears in the blocks.

    The bits of a linear are those of the first key of `widths` that its name contains; 0 leaves it in bf16.
    """
    config, generator = parse_config(Fields(dict(fields), "a random model")), torch.Generator().manual_seed(0)
    linears = {
        spec.name: spec
        for layer in range(config.layers)
        for products in config.layer(layer).products().values()
        for spec in products
    }
    bits = {name: next(bits for part, bits in widths.items() if part in name) for name in linears}
    linears = {name: spec for name, spec in linears.items() if bits[name]}
    packings = {name: Packing(bits[name], group) for name in linears}
    layout, plan = formats.writable(packings), list[tuple[str, torch.dtype, tuple[int, ...]]]()
    for name, shape in config.tensors():
        spec = linears.get(name.removesuffix(".weight"))
        own = [(name, torch.bfloat16, shape)]
        plan += own if spec is None else layout.planned_tensors(spec, packings[spec.name], torch.bfloat16)
    with CheckpointWriter(folder, plan) as writer:
        for name, shape in config.tensors():
            spec = linears.get(name.removesuffix(".weight"))
            if spec is None:
                writer.write(name, (torch.randn(shape, generator=generator) / 8 + (len(shape) == 1)).bfloat16())
            else:
                codes, scales = _random(spec, packings[spec.name], generator)
                layout.write_weight(writer, spec.name, packings[spec.name], codes, scales, "bfloat16", pack)
        ignore = [spec.name for spec in config.linears() if spec.name not in packings]
        described = layout.write_quantization(packings, ignore, "bfloat16")
        writer.add_file("config.json", json.dumps({**fields, "quantization_config": described}).encode())
        writer.finish()
    return folder


def _random(spec: LinearSpec, packing: Packing, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape, groups = (spec.out_features, spec.in_features), packing.groups(spec.in_features)
    codes = torch.randint(0, 1 << packing.bits, shape, generator=generator).to(torch.uint8)
    scales = (torch.rand(shape[0], groups, generator=generator) + 0.5) / (1 << packing.bits)
    return codes, scales.bfloat16()
