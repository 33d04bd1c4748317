"""Measures products of a few rows as replies do, on weights larger than the caches, against memory's rate.

    python -m tests.benchmarks.memory_share [--packings int2-g128,int4-g128] [--gguf Q2_K] [--activations 8,16]
        [--rows 1] [--megabytes 384] [--shape 11264x2048] [--seconds 2]

Prints GB/s of stored codes and scales, and their share of a plain reading of 1 GiB that alternates with the products,
medians of both. TQ1_0, TQ2_0 and Q1_0 files are held as int2 in groups of 256 and 128.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu.library import isa
from mycli.runtime.kernels.cpu.library.build import cache_folder
from mycli.runtime.quantization.scheme import parse_packing
from mycli.runtime.utils.memory import huge_empty
from tests.benchmarks.cpu_rows import libraries, of_gguf_type, packed
from tests.support.waiting_threads import wait_as_the_command_does

PACKINGS = "int2-g128,int2-g64,int2-g32,int3-g128,int4-g128"
READ_BYTES = 1 << 30


def main() -> None:
    """Print a line for each packing, activation width and number of rows."""
    wait_as_the_command_does()
    best = next(name for name in isa.SETS if isa.SETS[name].on(cpu().flags))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packings", default=PACKINGS)
    parser.add_argument("--gguf", default="")
    parser.add_argument("--activations", default="8,16")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(11264, 2048))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--set", default=best)
    given = parser.parse_args()
    library = libraries([given.set], cache_folder())[given.set]
    outputs, inputs = given.shape
    memory, threads = huge_empty((READ_BYTES,), torch.uint8).fill_(1), torch.get_num_threads()
    names = [name for name in (*given.packings.split(","), *given.gguf.split(",")) if name]
    print(f"{given.set}, {threads} threads, [{outputs}, {inputs}]")
    for name in names:
        for bits in map(int, given.activations.split(",")):
            products, nbytes = [], 0
            while nbytes < given.megabytes << 20:
                if name.startswith("int"):
                    packing = replace(parse_packing(name), activations=bits)
                    products.append(packed(library, packing, outputs, inputs, len(products) % 2))
                else:
                    products.append(of_gguf_type(library, name, bits, outputs, inputs, len(products) % 2))
                nbytes += products[-1].nbytes
            for rows in map(int, given.rows.split(",")):
                x = torch.randn(rows, inputs).bfloat16()
                rates, reads = [], []
                began = time.perf_counter()
                while time.perf_counter() - began < given.seconds or len(rates) < 5:
                    start = time.perf_counter()
                    for product in products:
                        product(x)
                    rates.append(nbytes / (time.perf_counter() - start) / 1e9)
                    start = time.perf_counter()
                    library.read(memory.data_ptr(), READ_BYTES, threads)
                    reads.append(READ_BYTES / (time.perf_counter() - start) / 1e9)
                rate, read = statistics.median(rates), statistics.median(reads)
                print(
                    f"{name:>10} {bits:2} bits {rows:3} rows {rate:6.1f} GB/s, memory {read:6.1f}: {rate / read:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
