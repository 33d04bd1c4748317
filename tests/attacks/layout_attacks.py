"""Build hostile quantized checkpoints: a valid third-party checkpoint with one change, and the expected error.

`ATTACKS` maps a name to the layout and case of `tests/support/foreign_layouts.py`, the change of `quantization_config`,
the changes of tensors by their suffix after the linear's name, and a pattern of the message.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Section = dict[str, Any]
Tensors = dict[str, Tensor]
Change = Callable[[Section, Tensors], object]
STATE = "weight.quant_state.bitsandbytes__nf4"


def put(part: str, tensor: Tensor | Callable[[Tensor], Tensor] | None) -> Change:
    def change(section: Section, tensors: Tensors) -> None:
        if tensor is None:
            del tensors[part]
        else:
            tensors[part] = tensor if isinstance(tensor, Tensor) else tensor(tensors[part].clone())

    return change


def say(**values: Any) -> Change:
    return lambda section, tensors: section.update(values)


def fill(*values: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[: len(values)] = torch.tensor(values).to(tensor.dtype)
        return tensor

    return change


def described(**values: Any) -> Callable[[Tensor], Tensor]:
    """Replace values of the quant state that bitsandbytes stores with a weight."""

    def change(tensor: Tensor) -> Tensor:
        merged = {**json.loads(bytes(tensor.tolist())), **values}
        return torch.tensor(list(json.dumps(merged).encode()), dtype=torch.uint8)

    return change


def text(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def byte(value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).view(-1)[0] = value
        return tensor

    return change


GPTQ, ORDERED = ("gptq", "gptq-int4-g32"), ("gptq", "gptq-int4-g32-ordered")
AWQ, FP8, TENSOR = ("awq", "gemm-g32"), ("fp8", "32x128-block16x32"), ("fp8", "weight_scale_inv-scalar-e4m3fn")
MLX, NV, MX = ("mlx", "affine-bfloat16-int4-g64"), ("mlx", "nvfp4"), ("mlx", "mxfp4")
NF4, NESTED = ("bitsandbytes", "nf4-g64"), ("bitsandbytes", "nf4-g64-nested")
_MISFIT = r"down_proj\.{} has shape"

ATTACKS: dict[str, tuple[tuple[str, str], Change, str]] = {
    "gptq-index-beyond": (ORDERED, put("g_idx", fill(99)), r"g_idx: does not put 32 inputs into each of 4"),
    "gptq-index-negative": (ORDERED, put("g_idx", fill(-1)), "g_idx: does not put 32 inputs"),
    "gptq-index-huge": (ORDERED, put("g_idx", fill(2**31 - 1)), "g_idx: does not put 32 inputs"),
    "gptq-index-one-group": (ORDERED, put("g_idx", lambda t: t * 0), "g_idx: does not put 32 inputs"),
    "gptq-index-int64": (ORDERED, put("g_idx", lambda t: t.long()), "g_idx is I64, expected I32"),
    "gptq-index-short": (ORDERED, put("g_idx", lambda t: t[:5]), _MISFIT.format("g_idx")),
    "gptq-index-undeclared": (ORDERED, say(desc_act=False), "g_idx: inputs are not in order"),
    "gptq-words-short": (GPTQ, put("qweight", lambda t: t[:3]), _MISFIT.format("qweight")),
    "gptq-words-none": (GPTQ, put("qweight", lambda t: t[:0]), _MISFIT.format("qweight")),
    "gptq-words-flat": (GPTQ, put("qweight", lambda t: t.flatten()), _MISFIT.format("qweight")),
    "gptq-words-scalar": (GPTQ, put("qweight", lambda t: t[0, 0]), _MISFIT.format("qweight")),
    "gptq-words-float": (GPTQ, put("qweight", lambda t: t.float()), "qweight is F32, expected I32"),
    "gptq-no-zeros": (GPTQ, put("qzeros", None), "qzeros: missing"),
    "gptq-zeros-wide": (GPTQ, put("qzeros", lambda t: t.repeat(1, 2)), _MISFIT.format("qzeros")),
    "gptq-scales-nan": (GPTQ, put("scales", fill(float("nan"))), "scales: 1 of 128 values are NaN"),
    "gptq-scales-none": (GPTQ, put("scales", lambda t: t[:0]), r"down_proj\.(scales|qzeros) has shape"),
    "gptq-claims-symmetric": (GPTQ, say(sym=True), "qzeros: not symmetric, but"),
    "gptq-bias": (GPTQ, put("bias", torch.ones(32)), "bias is not zero, but config.json has no such"),
    "gptq-bits-9": (GPTQ, say(bits=9), "bits must be between 2 and 8"),
    "gptq-bits-string": (GPTQ, say(bits="4"), "bits must be an integer"),
    "gptq-planar": (GPTQ, say(checkpoint_format="gptq_p"), "'gptq_p' is not supported"),
    "gptq-words-of-64": (GPTQ, say(pack_dtype="int64"), "pack_dtype must be int32"),
    "gptq-unnamed": (GPTQ, say(quant_method=None), "quant_method is missing"),
    "awq-gemv": (AWQ, say(version="gemv_fast"), "'gemv_fast' is not supported"),
    "awq-bits": (AWQ, say(bits=8), "bits = 8 is not supported"),
    "awq-transposed": (AWQ, put("qweight", lambda t: t.t()), _MISFIT.format("qweight")),
    "awq-scales-wide": (AWQ, put("scales", lambda t: t.repeat(1, 2)), _MISFIT.format("scales")),
    "awq-scales-infinite": (AWQ, put("scales", fill(float("inf"))), "scales: 1 of 128 values are NaN or inf"),
    "awq-no-zeros": (AWQ, put("qzeros", None), "qzeros: missing"),
    "fp8-no-scale": (FP8, put("weight_scale_inv", None), "weight_scale_inv: missing"),
    "fp8-scale-transposed": (FP8, put("weight_scale_inv", lambda t: t.t()), _MISFIT.format("weight_scale_inv")),
    "fp8-scale-integer": (FP8, put("weight_scale_inv", lambda t: t.int()), "weight_scale_inv is I32"),
    "fp8-scale-infinite": (FP8, put("weight_scale_inv", fill(float("inf"))), "1 of 8 values are NaN or inf"),
    "fp8-power-of-nan": (
        FP8,
        put("weight_scale_inv", torch.full((2, 4), 255, dtype=torch.uint8)),
        "weight_scale_inv: an E8M0 scale is 255",
    ),
    "fp8-not-a-number": (FP8, put("weight", byte(0x7F)), "weight: 1 of 4096 values are NaN"),
    "fp8-block-negative": (FP8, say(weight_block_size=[-1, 32]), "weight_block_size must be two sizes"),
    "fp8-block-of-three": (FP8, say(weight_block_size=[1, 2, 3]), "weight_block_size must be a list of at most 2"),
    "fp8-block-boolean": (FP8, say(weight_block_size=[True, True]), "weight_block_size must hold values of type int"),
    "fp8-block-undeclared": (FP8, say(weight_block_size=None), _MISFIT.format("weight_scale_inv")),
    "fp8-scale-of-two": (TENSOR, put("weight_scale_inv", torch.ones(2)), _MISFIT.format("weight_scale_inv")),
    "fp8-dense-weight": (FP8, put("weight", lambda t: t.bfloat16()), "weight is BF16, expected F8_E4M3"),
    "mlx-bits-9": (MLX, say(bits=9), "bits must be between 2 and 8"),
    "mlx-mode": (MLX, say(mode="trellis"), "'trellis' is not supported"),
    "mlx-other-bits": (MLX, say(bits=5), _MISFIT.format("weight")),
    "mlx-group-does-not-divide": (MLX, say(group_size=48), "48 does not divide 128"),
    "mlx-no-biases": (MLX, put("biases", None), "biases: missing"),
    "mlx-biases-nan": (MLX, put("biases", fill(float("nan"))), "biases: 1 of 16 values are NaN"),
    "mlx-words-signed": (MLX, put("weight", lambda t: t.view(torch.int32)), "weight is I32, expected U32"),
    "mlx-says-mx": (MLX, say(mode="mxfp4"), r"biases: not part of the model"),
    "mlx-scale-nan": (NV, put("scales", fill(0x7F)), "scales: 1 of 64 values are NaN"),
    "mlx-power-of-nan": (MX, put("scales", fill(0xFF)), "scales: an E8M0 scale is 255"),
    "bnb-kind": (NF4, say(bnb_4bit_quant_type="nf3"), "'nf3' is not supported"),
    "bnb-other-kind": (NF4, say(bnb_4bit_quant_type="fp4"), "quant_state.bitsandbytes__nf4: not part of the model"),
    "bnb-state-not-json": (NF4, put(STATE, text(b"\xff" * 40)), f"{STATE}: not acceptable JSON"),
    "bnb-state-nested": (NF4, put(STATE, text(b'{"a":' * 800)), f"{STATE}.*(JSON|nested)"),
    "bnb-state-huge": (NF4, put(STATE, text(b" " * 9000)), _MISFIT.format("weight.quant_state.bitsandbytes__nf4")),
    "bnb-state-empty": (NF4, put(STATE, text(b"")), "quant_state.bitsandbytes__nf4 has shape"),
    "bnb-state-shape": (NF4, put(STATE, described(shape=[128, 32])), r"shape must be \[32, 128\]"),
    "bnb-state-shape-huge": (NF4, put(STATE, described(shape=[1 << 62, 1 << 62])), r"shape must be \[32, 128\]"),
    "bnb-state-block": (NF4, put(STATE, described(blocksize=128)), "blocksize must be 64, not 128"),
    "bnb-state-kind": (NF4, put(STATE, described(quant_type="fp4")), "quant_type must be 'nf4'"),
    "bnb-offset-string": (NESTED, put(STATE, described(nested_offset="0")), "nested_offset must be a number"),
    "bnb-offset-huge": (NESTED, put(STATE, described(nested_offset=1e300)), "nested_offset must be between"),
    "bnb-other-table": (NF4, put("weight.quant_map", fill(-2.0)), "quant_map: not the table of nf4"),
    "bnb-table-short": (NF4, put("weight.quant_map", lambda t: t[:8]), _MISFIT.format("weight.quant_map")),
    "bnb-scales-short": (NF4, put("weight.absmax", lambda t: t[:7]), _MISFIT.format("weight.absmax")),
    "bnb-scales-nan": (NF4, put("weight.absmax", fill(float("nan"))), "absmax: 1 of 64 values are NaN"),
    "bnb-nested-no-map": (NESTED, put("weight.nested_quant_map", None), "nested_quant_map: missing"),
    "bnb-nested-map-short": (
        NESTED,
        put("weight.nested_quant_map", lambda t: t[:9]),
        _MISFIT.format("weight.nested_quant_map"),
    ),
    "bnb-bytes-short": (NF4, put("weight", lambda t: t[:9]), _MISFIT.format("weight")),
    "aliens": (GPTQ, say(quant_method="../../awq"), "'../../awq' is not supported"),
    "private": (GPTQ, say(quant_method="_parts"), "'_parts' is not supported"),
    "none-there": (MLX, put("scales", None), "but the files have none"),
}
