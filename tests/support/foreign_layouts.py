"""Builds small quantized linears with the packages of their layouts, with the weights that those packages read back.

`python -m tests.support.foreign_layouts` rewrites tests/runtime/checkpoint/foreign/*.safetensors; it needs auto-round
0.16, bitsandbytes 0.50, mlx with mlx-cpu 0.32 and compressed-tensors 0.20. The tests need only the files: their
metadata hold the config of each case, and dtype and sha256 of the weight.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

FILES = Path(__file__).parents[1] / "runtime" / "checkpoint" / "foreign"
EXPECTED = "expected"
LINEAR = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 32, 128


@dataclass(frozen=True)
class Case:
    """Holds the `section` of config.json, `tensors` by suffix of the name, and `weight` as the package reads it."""

    section: dict[str, Any]
    tensors: dict[str, Tensor]
    weight: Tensor | None  # None if read from a file: then its digest is compared
    dtype: str = "bfloat16"
    digest: str = ""
    shape: tuple[int, int] = (ROWS, COLUMNS)

    @property
    def config(self) -> dict[str, Any]:
        """Return a whole config.json of a model whose first down projection has this shape."""
        return {
            "model_type": "llama",
            "hidden_size": self.shape[0],
            "intermediate_size": self.shape[1],
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 8,
            "dtype": self.dtype,
            **self.section,
        }


def digest(weight: Tensor) -> str:
    """Return dtype and sha256 of the values; minus zero counts as zero."""
    values = (weight + 0).contiguous().view(torch.uint8).numpy().tobytes()
    return f"{str(weight.dtype).removeprefix('torch.')} {hashlib.sha256(values).hexdigest()}"


def weights(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def gptq() -> Iterator[tuple[str, Case]]:
    """Yield cases by AutoRound's torch layers: v1 stores zero points minus one, v2 stores them unchanged."""
    kinds = {"gptq": "qlinear_torch_zp", "gptq_v2": "qlinear_torch"}
    widths = [(bits, group) for bits in range(2, 9) for group in (32, 64, 128)] + [(4, None), (8, None)]
    for version, module in kinds.items():
        layer = importlib.import_module(f"auto_round_extension.torch.{module}").QuantLinear
        for bits, group in widths:
            for ordered in (False, True):
                if ordered and group != 32:
                    continue
                size = group or COLUMNS
                seed, groups = bits * size, COLUMNS // size
                scales = (weights(seed, ROWS, groups).abs() + 0.1).half() / (1 << bits - 1)
                # v1 cannot store a zero point of 0 without an overflow into the next field.
                zeros = integers(seed, (1 << bits) - 1, ROWS, groups) + 1
                linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
                linear.weight.data = weights(seed + 1)
                packed = layer(bits, size, COLUMNS, ROWS, False, g_idx=True)
                packed.device = torch.device("cpu")  # read by the layer of v2
                packed.pack(linear, scales.float(), zeros.float())
                if ordered:
                    mixed = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(bits))
                    packed.g_idx = (mixed // size).int()
                weight = packed(torch.eye(COLUMNS, dtype=torch.float32)).t().half()
                section = {
                    "quant_method": "gptq",
                    "checkpoint_format": version,
                    "bits": bits,
                    "group_size": group or -1,
                    "desc_act": ordered,
                    "sym": False,
                }
                tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
                case = Case({"quantization_config": section}, tensors, weight, "float16")
                yield f"{version}-int{bits}-{f'g{group}' if group else 'rows'}{'-ordered' if ordered else ''}", case


def awq() -> Iterator[tuple[str, Case]]:
    """Yield AutoAWQ's layout as read by the converter of compressed-tensors, and as written and read by AutoRound."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(codes: Tensor) -> Tensor:
        eights = codes.to(torch.int64).view(codes.shape[0], -1, 8)
        return sum(eights[:, :, column] << 4 * place for place, column in enumerate(order)).to(torch.int32)

    for group in (32, 64, 128):
        groups = COLUMNS // group
        scales = (weights(group, groups, ROWS).abs() + 0.1).half()
        tensors = {
            "qweight": words(integers(group, 16, COLUMNS, ROWS)),
            "qzeros": words(integers(group + 1, 16, groups, ROWS)),
            "scales": scales,
        }
        section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        named = {f"{LINEAR}.{name}": tensor.clone() for name, tensor in tensors.items()}
        made = AutoAWQConverter.from_autoawq_config(section).process(named)
        codes = unpack_from_int32(made[f"{LINEAR}.weight_packed"], 4, torch.Size((ROWS, COLUMNS)))
        zeros = unpack_from_int32(made[f"{LINEAR}.weight_zero_point"], 4, torch.Size((ROWS, groups)), packed_dim=0)
        shifted = codes.view(ROWS, groups, group).half() - zeros.unsqueeze(-1).half()
        weight = (shifted * made[f"{LINEAR}.weight_scale"].unsqueeze(-1)).view(ROWS, COLUMNS)
        yield f"gemm-g{group}", Case({"quantization_config": section}, tensors, weight, "float16")
    maker = importlib.import_module("auto_round.export.export_to_awq.utils")
    for group in (32, 64, 128):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = weights(group + 2)
        scales = ((weights(group + 3, COLUMNS // group, ROWS).abs() + 0.1) / 8).half()
        zeros = integers(group + 4, 16, COLUMNS // group, ROWS)
        packed = maker.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.float(), zeros=zeros, device="cpu")
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
        weight = maker.dequantize_gemm(*tensors.values(), 4, group).t().half()
        section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        yield f"auto-round-g{group}", Case({"quantization_config": section}, tensors, weight, "float16")


def fp8() -> Iterator[tuple[str, Case]]:
    """Yield blocks, cropped at the edges, as read by the converter of compressed-tensors, and one scale per tensor."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    for rows, columns, block in ((32, 128, (16, 32)), (40, 96, (16, 64)), (24, 80, (128, 128)), (40, 90, (16, 16))):
        weight = weights(rows, rows, columns).to(torch.float8_e4m3fn)
        scale = weights(columns, -(-rows // block[0]), -(-columns // block[1])).abs() + 0.01
        reader = FP8BlockDequantizer(weight_block_size=block, targets=["re:.*"])
        tensors = {"weight": weight, "weight_scale_inv": scale}
        read = reader.process({f"{LINEAR}.{name}": tensor.clone() for name, tensor in tensors.items()})
        section = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
        case = Case({"quantization_config": section}, tensors, read[f"{LINEAR}.weight"], shape=(rows, columns))
        yield f"{rows}x{columns}-block{block[0]}x{block[1]}", case
    section = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    for name, shape in (("weight_scale_inv", ()), ("weight_scale", (1,)), ("weight_scale", (ROWS, 1))):
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            weight, scale = weights(7).to(kind), torch.full(shape, 0.0371)
            tensors = {"weight": weight, name: scale, "input_scale": torch.ones(1)}
            read = (weight.float() * scale).bfloat16()
            label = f"{name}-{'x'.join(map(str, shape)) or 'scalar'}-{str(kind).rpartition('_')[2]}"
            yield label, Case({"quantization_config": section}, tensors, read)


def mlx_tensor(array: Any) -> Tensor:
    import mlx.core as mx
    import numpy as np

    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def mlx() -> Iterator[tuple[str, Case]]:
    """Yield cases by mlx; affine weights are read in fp32, which rounds once, since 16 bits would round twice."""
    import mlx.core as mx

    types = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

    rows = 8
    given = mx.array(weights(3, rows).numpy())
    for dtype, kind in types.items():
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128) if dtype == "bfloat16" else (64,):
                parts = mx.quantize(given.astype(kind), group_size=group, bits=bits)
                wide = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
                weight = mlx_tensor(mx.dequantize(*wide, group_size=group, bits=bits)).to(getattr(torch, dtype))
                section = {"quantization": {"group_size": group, "bits": bits, "mode": "affine"}}
                tensors = dict(zip(("weight", "scales", "biases"), map(mlx_tensor, parts), strict=True))
                yield f"affine-{dtype}-int{bits}-g{group}", Case(section, tensors, weight, dtype, shape=(rows, COLUMNS))
    for mode, bits, group in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)):
        parts = mx.quantize(given.astype(mx.bfloat16), group_size=group, bits=bits, mode=mode)
        weight = mlx_tensor(mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.bfloat16))
        section = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
        tensors = dict(zip(("weight", "scales"), map(mlx_tensor, parts), strict=True))
        yield mode, Case(section, tensors, weight, shape=(rows, COLUMNS))


def bitsandbytes() -> Iterator[tuple[str, Case]]:
    """Yield cases by bitsandbytes in plain torch; its CPU code needs inputs in multiples of the block."""
    import bitsandbytes.functional as maker
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    shapes = {64: (ROWS, COLUMNS), 256: (ROWS, COLUMNS), 128: (24, 90), 512: (ROWS, COLUMNS), 32: (24, 90)}
    shapes |= {1024: (40, 90), 2048: (48, 100), 4096: (40, 110)}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for block, shape in shapes.items():
                given = weights(block + nested, *shape).bfloat16()
                packed, state = maker.quantize_4bit(given, blocksize=block, quant_type=kind, compress_statistics=nested)
                scales = state.absmax
                if nested:
                    scales = maker.dequantize_blockwise(scales, state.state2) + state.offset
                weight = _dequantize_4bit_compute(packed.view(-1), scales, state.code, block, shape, torch.bfloat16)
                parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
                section = {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "bnb_4bit_quant_type": kind,
                    "bnb_4bit_use_double_quant": nested,
                }
                case = Case({"quantization_config": section}, {"weight": packed, **parts}, weight, shape=shape)
                yield f"{kind}-g{block}" + ("-nested" if nested else ""), case
    codes, scales, _ = maker.int8_vectorwise_quant(weights(5).half())
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    weight = maker.int8_vectorwise_dequant(codes, scales).half()
    yield "int8", Case({"quantization_config": section}, tensors, weight, "float16")


MAKERS: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    made.__name__: made for made in (gptq, awq, fp8, mlx, bitsandbytes)
}


def write(layout: str) -> None:
    tensors, about = {}, {}
    for name, case in MAKERS[layout]():
        assert case.weight is not None
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in case.tensors.items()}
        if case.weight.dtype == torch.float32:  # dot products differ in the last place: compared without a digest
            tensors[f"{name}/{EXPECTED}"] = case.weight
        about[name] = {
            "section": case.section,
            "dtype": case.dtype,
            "shape": case.shape,
            "digest": digest(case.weight),
        }
    FILES.mkdir(exist_ok=True)
    save_file(tensors, FILES / f"{layout}.safetensors", metadata={"cases": json.dumps(about)})


def stored(layout: str) -> dict[str, Case]:
    path = FILES / f"{layout}.safetensors"
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["cases"])
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in about}
    for key, tensor in load_file(path).items():
        name, _, part = key.partition("/")
        parts[name][part] = tensor
    return {
        name: Case(
            each["section"],
            parts[name],
            parts[name].pop(EXPECTED, None),
            each["dtype"],
            each["digest"],
            tuple(each["shape"]),
        )
        for name, each in about.items()
    }


if __name__ == "__main__":
    for layout in MAKERS:
        write(layout)
        print(f"{layout}: {len(stored(layout))} cases")
