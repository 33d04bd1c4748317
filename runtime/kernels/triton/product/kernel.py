"""Decides which packed weights the Triton kernels multiply, after a check on this machine; called once per weight."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from threading import Lock

import torch

from mycli.runtime.device.placement import decline_dtype, decline_packed
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.reference import DequantizeMatmul
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, TritonMatmul, chip_of
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.product.weight_layout import gpu_packing
from mycli.runtime.kernels.triton.toolchain import missing_tool
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import Packing

# Imports Triton only when called.


def small_product(device: torch.device, packing: Packing, chip: Chip, rows: int) -> float:
    """Return the relative error of a product of `rows` rows and a small random weight against fp64."""
    generator = torch.Generator().manual_seed(rows)
    columns = 2 * (packing.group_size or 128)
    codes = torch.randint(0, 1 << packing.bits, (96, columns), generator=generator).to(torch.uint8)
    codes &= {"e5m2": 0xBB, "e4m3": 0xF7}.get(packing.codes, 0xFF)  # no NaN or infinity
    scales = torch.randn(96, packing.groups(columns), generator=generator).bfloat16()
    offsets = torch.randn(scales.shape, generator=generator) if packing.offsets else None
    weight = PackedWeight(pack(codes, packing.bits), scales, packing, columns, offsets)
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    expected = x.double() @ dequantize(weight).double().t()
    device_offsets = None if offsets is None else offsets.to(device)
    device_weight = replace(weight, packed=weight.packed.to(device), scales=scales.to(device), offsets=device_offsets)
    product = TritonMatmul(device_weight, chip)(x.to(device)).cpu().double()
    return float((product - expected).norm() / expected.norm())


_CHECK_LOCK = Lock()  # layers are loaded by several threads


def self_check(device: torch.device, packing: Packing) -> Declined | None:
    """Return why the kernels cannot be used here, None if small products are right; the first call checks."""
    with _CHECK_LOCK:
        return _checked(device, packing)


@cache  # compiling takes a second, and the answer does not change
def _checked(device: torch.device, packing: Packing) -> Declined | None:
    for rows in (1, 12):
        try:
            error = small_product(device, packing, chip_of(device), rows)
        except Exception as trouble:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            return missing_tool() or Declined("kernel-raises", {"error": summarize_error(trouble)})
        if not error < 5e-3:
            return Declined("product-check-failed", {"packing": packing.name, "error": error})
    return None


class TritonKernel:
    """Multiplies integer codes of every width, and tables, on NVIDIA GPUs from compute capability 8.0."""

    name = "triton"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Anything but bf16 or fp16 activations on a CUDA device of capability 8.0 or more, with Triton installed."""
        if device.type != "cuda":
            return Declined("not-on-cuda", {"device": device.type})
        if torch.version.hip is not None:
            return Declined("untested-on-amd")
        if find_spec("triton") is None:
            return Declined("triton-not-installed")
        if dtype not in ACTIVATION_DTYPES:
            return decline_dtype(dtype)
        stored = gpu_packing(packing)
        if stored is None:
            return Declined("packing-group-not-multiple", {"packing": packing.name, "multiple": 16})
        if (old_gpu := decline_packed(device)) is not None:
            return old_gpu
        if device.index is not None and device.index != (current := torch.cuda.current_device()):
            return Declined("other-cuda-device", {"current": current, "device": device})
        return self_check(device, stored)

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Repack the codes on their device; the caller then drops the original tensors."""
        # NaN codes cannot be unpacked by shifting bits; the reference kernel looks them up.
        magnitude = weight.packed.view(torch.uint8) & 0x7F
        largest = {"e4m3": 0x7E, "e5m2": 0x7B}.get(weight.packing.codes)
        if largest is not None and bool((magnitude > largest).any()):
            return DequantizeMatmul(weight)
        return TritonMatmul(weight, chip_of(weight.packed.device))
