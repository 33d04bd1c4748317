"""Measures CPU matrix products over the number of rows, for every supported instruction set, and compares with torch.

    PYTHONPATH=.links python -m tests.benchmarks.cpu_rows [--packing int4-g128] [--codes nf4] [--gguf Q4_K]
        [--wide-scales] [--dense] [--activations 16|8|both] [--shape 8192x2048] [--rows 1,2,4] [--sets amx,avx2]
        [--repeats 8]

A column is an instruction set and an activation width. Prints 10^9 operations per second (two per weight and row), the
best of `--repeats` calls; the sets alternate within each repeat, so that load from other processes affects all of them.
Two weights alternate, so that the first caches do not hold them. A rate that falls by more than the noise as rows grow
is a fault. `torch` is its dense bf16 product; $ONEDNN_MAX_CPU_ISA limits its instructions as MYCLI_CPU_ISA limits ours.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.checkpoint.gguf.types import QUANTIZED
from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu.library import isa
from mycli.runtime.kernels.cpu.library.build import Native, cache_folder, compile_library, load_library
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, multiply_dense
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import INTEGER_TABLES, SCALE_UNITS, ActivationBits, Codes, Packing, parse_packing
from tests.support.packed_weights import byte_scale_weight, code_bits, super_block_weight

ACTIVATION_BITS: tuple[ActivationBits, ...] = (16, 8)
TYPES = {kind.name: kind for kind in QUANTIZED if kind.byte_scales is not None}
ROWS = (*range(1, 18), 24, 32, 33, 48, 64, 96, 128, 256, 512)

Product = Callable[[Tensor], Tensor]


def libraries(names: list[str], folder: Path) -> dict[str, Native]:
    """Return the native library of each set, compiling the missing ones, which takes a while."""
    processor = cpu()
    return {name: load_library(compile_library(folder, isa.compiler_flags(name, processor))) for name in names}


def packed(library: Native, packing: Packing, outputs: int, inputs: int, seed: int) -> Product:
    """Return a product with random codes and scales; `packing` also sets the activation width."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, (outputs, packing.words(inputs)), generator=generator)
    scales = (torch.randn(outputs, packing.groups(inputs), generator=generator) * 0.02).bfloat16()
    weight = PackedWeight(words.to(torch.int32), scales, packing, inputs)
    native = packing.codes in ("int", "e2m1", *INTEGER_TABLES)
    return CpuMatmul(library, weight) if native else TableMatmul(library, weight)


def of_gguf_type(
    library: Native, name: str, bits: ActivationBits, outputs: int, inputs: int, seed: int, *, wide: bool = False
) -> Product:
    """Return a product with random codes of the GGUF type `name`; wide: its scales are numbers, not bytes."""
    kind, shape = TYPES[name], (outputs, inputs)
    if kind.codes == "e2m1" and kind.byte_scales is not None:
        weight = byte_scale_weight(kind.byte_scales, shape, kind.group, seed=seed)
    else:
        weight = super_block_weight(kind.bits, shape, kind.group, offsets=kind.minimum, seed=seed)
        weight = replace(weight, scales=weight.scales * SCALE_UNITS.get(kind.codes, 1.0))
    packing = replace(weight.packing, activations=bits, codes=kind.codes)
    if wide:
        weight, packing = replace(weight, factors=None), replace(packing, byte_scales=None)
    return CpuMatmul(library, replace(weight, packing=packing))


def rates(products: dict[str, list[Product]], x: Tensor, outputs: int, repeats: int) -> dict[str, float]:
    best = dict.fromkeys(products, float("inf"))
    for turn in range(repeats):
        for name, both in products.items():
            begin = time.perf_counter()
            both[turn % 2](x)
            best[name] = min(best[name], time.perf_counter() - begin)
    return {name: 2 * outputs * x.numel() / seconds / 1e9 for name, seconds in best.items()}


def main() -> None:
    here = [name for name in isa.SETS if isa.SETS[name].on(cpu().flags)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packing", type=parse_packing, default=Packing(4, 128))
    parser.add_argument("--codes", choices=get_args(Codes), default="int", help="other than integers, in those groups")
    parser.add_argument("--gguf", choices=sorted(TYPES), help="with scales of a byte, in its groups")
    parser.add_argument("--wide-scales", action="store_true", help="those of --gguf in 16 or 32 bits")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--activations", choices=("16", "8", "both"), default="both", help="bits, with packed weights")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(8192, 2048))
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--sets", type=lambda text: text.split(","), default=here)
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    packing: Packing = given.packing
    if given.codes != "int":
        packing = Packing(code_bits(given.codes), packing.group_size, codes=given.codes)
    outputs, inputs = given.shape
    found = libraries(given.sets, cache_folder())
    weights = [(torch.randn(outputs, inputs) * 0.02).bfloat16() for _ in range(2)]
    products: dict[str, list[Product]]
    if given.dense:
        products = {
            name: [lambda x, w=w, one=one: multiply_dense(one, x, w) for w in weights] for name, one in found.items()
        }
    else:
        bits: list[ActivationBits] = [each for each in ACTIVATION_BITS if given.activations in (str(each), "both")]
        products = {
            f"{name}/{each}": [
                of_gguf_type(one, given.gguf, each, outputs, inputs, seed, wide=given.wide_scales)
                if given.gguf
                else packed(one, replace(packing, activations=each), outputs, inputs, seed)
                for seed in range(2)
            ]
            for name, one in found.items()
            for each in bits
        }
    products["torch"] = [lambda x, w=w: functional.linear(x, w) for w in weights]
    kind = "dense bf16" if given.dense else given.gguf or packing.name
    print(f"{kind} [{outputs}, {inputs}], 10^9 operations per second")
    print(" rows" + "".join(f"{name:>15}" for name in products))
    for rows in given.rows:
        found_rates = rates(products, torch.randn(rows, inputs).bfloat16(), outputs, given.repeats)
        print(f"{rows:5}" + "".join(f"{rate:15.0f}" for rate in found_rates.values()), flush=True)


if __name__ == "__main__":
    main()
