"""Measures the KL and top-1 cost of 16-bit integer activations on the CPU for a packed model.

    python -m tests.benchmarks.integer_path MODEL [--tokens 24k]

The reference multiplies exact weights by fp32 activations. It is compared with bf16 activations and the native integer
products, as used for decoding, and with bf16 activations and products as exact as the reference's, where only the
activations passed between products are rounded. The difference of the two is the cost of the integers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mycli.cli.flags.options import parse_count
from mycli.quant.evaluate import cut, evaluate, held_out_text
from mycli.quant.export._weights import exact_values
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.formats import read_weight
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.kernels.cpu.matmul import CpuKernel
from mycli.runtime.layers.block import Block
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight

_CPU = torch.device("cpu")
ROWS = 32  # below the number at which the kernel switches to other arithmetic


class _Exact:
    """Multiplies codes times scales in fp32 with fp32 sums."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = exact_values(weight)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return (x.float() @ self._weight.T).to(x.dtype)

    def dequantize(self) -> Tensor:
        return self._weight


class _Integers:
    """Runs the native products on few rows at a time."""

    def __init__(self, weight: PackedWeight) -> None:
        self._inner = CpuKernel().prepare(weight, torch.bfloat16)
        self.nbytes = self._inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._inner(part) for part in x.split(ROWS)])

    def dequantize(self) -> Tensor:
        return self._inner.dequantize()


class _SideBySide:
    """Concatenates the outputs of several products of one input."""

    def __init__(self, parts: Sequence[Matmul]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self._parts])


class _Model(StreamedModel):
    """Builds every packed product of the blocks with the class `product`."""

    def __init__(self, folder: Path, dtype: torch.dtype, product: type[_Exact] | type[_Integers]) -> None:
        super().__init__(open_model_folder(folder), Placement(_CPU, dtype))
        self._product = product

    def block(self, layer: int) -> Block:
        """Return one layer with its products replaced."""
        block = super().block(layer)
        for linear in block.products.values():
            parts = [read_weight(self._checkpoint, [spec], self.packings[spec.name], _CPU) for spec in linear.specs]
            linear.replace(_SideBySide([self._product(part) for part in parts]))
        return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=parse_count, default=24 << 10)
    options = parser.parse_args()
    folder = resolve(options.model, offline=True).folder
    reference = _Model(folder, torch.float32, _Exact)
    text = cut(held_out_text(), reference.folder.tokenizer(), 512, options.tokens)
    integers, exact = (_Model(folder, torch.bfloat16, product) for product in (_Integers, _Exact))
    pairs = {
        "bf16 with integer products against fp32": (integers, reference),
        "bf16 with exact products against fp32": (exact, reference),
        "integer products against exact ones": (integers, exact),
    }
    for name, (model, against) in pairs.items():
        found = evaluate(model, text, against).divergence
        assert found is not None
        top = f"same top {found.same_top1.value:.2%}"
        print(f"{name:40}  KL mean {found.kl.value:.4g}, 99% {found.kl_p99:.3g}, {top}", flush=True)


if __name__ == "__main__":
    main()
