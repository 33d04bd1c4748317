"""Self-test of an installation: versions, every kernel against its reference, and a reply that is known."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.registry import kernels
from mycli.runtime.quantization.packed_weight import Kernel, PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import BITS, Packing
from mycli.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:  # `open` stands above this room: the caller opens the model
    from mycli.runtime.engine.replies.opened_model import OpenedModel

DISTRIBUTIONS = ("mycli-llm", "torch", "triton", "tokenizers", "safetensors", "huggingface-hub", "numpy")
PACKINGS = (*(Packing(bits, 128) for bits in BITS), Packing(4, 32), Packing(4, None), Packing(8, None))
# Relative RMS error of a product: above the error of 8-bit activations, far below that of a wrong layout.
PRODUCT_TOLERANCE = 0.02
PRODUCT_ROWS = (1, 33)  # decoding, and a prompt that is not a multiple of any tile
OUT_FEATURES, IN_FEATURES = 256, 512
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


@dataclass(frozen=True)
class KernelFinding:
    """One kernel on one packing. `error` is the relative RMS error; None if it `declined`."""

    kernel: str
    packing: str
    used: bool  # the first in the order of preference that accepts it
    error: float | None
    declined: Declined | None = None

    @property
    def ok(self) -> bool:
        return self.error is None or self.error <= PRODUCT_TOLERANCE


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    installed = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _weight(packing: Packing, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> PackedWeight:
    codes = torch.randint(0, 1 << packing.bits, (OUT_FEATURES, IN_FEATURES), generator=generator).to(torch.uint8)
    scales = torch.randn(OUT_FEATURES, packing.groups(IN_FEATURES), generator=generator) * 0.02
    packed = pack(codes, packing.bits)
    return PackedWeight(packed.to(device), scales.to(device, dtype), packing, IN_FEATURES)


def relative_rms(values: Tensor, exact: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `exact`; infinity if a value is not finite."""
    if not bool(values.isfinite().all()):
        return float("inf")
    difference = values.double() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def _error(kernel: Kernel, weight: PackedWeight, dtype: torch.dtype, generator: torch.Generator) -> float:
    # The largest over `PRODUCT_ROWS`, against dequantized weights multiplied in fp64.
    dense = dequantize(weight).double()
    matmul = kernel.prepare(weight, dtype)
    worst = 0.0
    for rows in PRODUCT_ROWS:
        x = torch.randn(rows, IN_FEATURES, generator=generator).to(dense.device, dtype)
        worst = max(worst, relative_rms(matmul(x), x.double() @ dense.T))
    return worst


def check_kernels(device: torch.device, dtype: torch.dtype) -> Iterator[KernelFinding]:
    """Each kernel on each packing, in order of preference: used, only correct, or declined with its reason."""
    generator = torch.Generator().manual_seed(0)
    for packing in PACKINGS:
        used = False
        for kernel in kernels():
            reason = kernel.decline(packing, OUT_FEATURES, IN_FEATURES, device, dtype)
            if reason is not None:
                yield KernelFinding(kernel.name, packing.name, False, None, reason)
                continue
            error = _error(kernel, _weight(packing, device, dtype, generator), dtype, generator)
            yield KernelFinding(kernel.name, packing.name, not used, error)
            used = True


def golden_reply(pico: "OpenedModel") -> str:
    """Return the greedy reply of `pico` to `QUESTION`; it must be `ANSWER` on every device and in every precision."""
    return pico.generate(QUESTION, params=SamplingParams(), max_tokens=32).text
