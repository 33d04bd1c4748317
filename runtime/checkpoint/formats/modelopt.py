"""NVFP4 as NVIDIA's ModelOpt writes it, and its FP8 beside it or alone: each linear's tensors say which it is.

An NVFP4 weight is E2M1 codes, two a byte, the first in the low half, an E4M3 scale for every 16 of them and an fp32 one
for all; those multiply. FP8 weights are the layout `fp8`. Imports torch only to read.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, Headers, Promise, Scales, _parts, _targets, fp8, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "ModelOpt's NVFP4 and FP8"
IGNORED = (".input_scale", ".k_scale", ".v_scale")  # of activations and of the cache
TELLING = (("weight_scale_2", "a scale of NVFP4, but config.json does not say so", "quant_method must be modelopt"),)
_GROUP = 16


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    """The packing of each linear by its tensors; where these are not known, of those not excepted by `quant_algo`."""
    if headers is not None:
        result = fp8.read_quantization(Fields({}, section.source), config, headers)
        for linear in quantizable(config):
            if f"{linear.name}.weight_scale_2" in headers:
                result[linear.name] = _packing(config.dtype)
        return result
    kept = [name.replace("*", "") for name in section.array("ignore", str)]
    if not section.text("quant_algo").upper().endswith("NVFP4"):
        return fp8.read_quantization(Fields({"modules_to_not_convert": kept}, section.source), config, None)
    linears = (each for each in quantizable(config) if each.name not in (EMBEDDING, "lm_head"))
    return {linear.name: _packing(config.dtype) for linear in linears if not _targets.named(linear.name, kept)}


def _packing(dtype: Dtype) -> Packing:
    return Packing(4, _GROUP, layout="modelopt", codes="e2m1", scale_dtype=_parts.unless(dtype, "float32"))


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[Promise]:
    """Bytes of codes, the scales of groups, and that of all."""
    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    yield name, (rows, columns // 2), ("U8",)
    yield f"{name}_scale", (rows, packing.groups(columns)), ("F8_E4M3",)
    yield _parts.either(headers, f"{name}_scale_2", _parts.SCALAR, ("F32",))


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """The headers say it all."""


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    """The codes into `out`, as they are stored; scales in fp32. Raises what reading does."""
    name = f"{linear.name}.weight"
    _parts.put_bytes(checkpoint.read(name), out)
    return Scales(checkpoint.read(f"{name}_scale").float() * checkpoint.read(f"{name}_scale_2").float())
