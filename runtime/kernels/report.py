"""What the Triton kernels compile to, counted without a GPU.

    python -m mycli.runtime.kernels.report [80 90 ..]        the table, for these compute capabilities or all
    python -m mycli.runtime.kernels.report docs/kernels.md   the same, put into that file between its two marks

Compiles each kernel for each architecture, disassembles it with the tools in Triton's own package and counts the
instructions of its main loop, the width of its loads, spills, registers, shared memory and how many blocks fit on a
multiprocessor. Judges nothing: the bars are in the tests. The one place of the runtime that writes to standard output,
because it is a development tool of its own and no part of the command line.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mycli.runtime.kernels import triton_activation, triton_attention, triton_fused, triton_matmul, triton_tiles
from mycli.runtime.kernels.triton_arrive import Tail
from mycli.runtime.kernels.triton_choose import BLOCK, choose_kernel, partial_kernel
from mycli.runtime.kernels.triton_decode import BLOCK_K, attend_warps, combination
from mycli.runtime.kernels.triton_packed import constants, dequantize_warps
from mycli.runtime.kernels.triton_shuffle import layout_of, tile_k
from mycli.runtime.kernels.triton_tiles import Chip, Tile
from mycli.runtime.packing import BITS, GROUP_SIZES, Packing

CAPABILITIES = (80, 86, 89, 90, 100, 120)
AMD = "gfx942"
MARK = "<!-- measured by mycli.runtime.kernels.report -->"
# Per multiprocessor: warps, KiB of shared memory, blocks (CUDA programming guide, compute capabilities).
_LIMITS = {80: (64, 164, 32), 86: (48, 100, 16), 89: (48, 100, 24), 90: (64, 228, 32), 100: (64, 228, 32)}
_LIMITS[120] = (48, 100, 32)
_REGISTERS = 65536
_ROOT = triton_matmul.Root("*fp32", "i32", "i32", "fp32", 32)
_OPERAND = triton_activation.Operand("*fp16", "*fp32", "i32", "i32", 128, True)


@dataclass(frozen=True)
class Build:
    """One kernel with all that it is compiled for. `weights`: how many one turn of its main loop handles, 0 if none.

    types: of each argument that is none of the `constants`; of a named tuple, a tuple of types and constants.
    """

    name: str
    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    weights: int = 0
    unaligned: tuple[str, ...] = ()  # integers that need not be multiples of 16

    def compile(self, target: GPUTarget) -> Any:
        """The compiled kernel; needs no GPU."""
        constants: dict[Any, Any] = dict(self.constants)
        aligned: dict[tuple[int, ...], list[list[Any]]] = {}

        def type_of(path: tuple[int, ...], name: str, given: Any) -> Any:
            if isinstance(given, tuple):
                fields = given._asdict().items()  # type: ignore[attr-defined]  # they are named tuples
                return type(given)(*(type_of((*path, i), *field) for i, field in enumerate(fields)))
            if not isinstance(given, str):
                constants[path] = given
                return "constexpr"
            if given != "constexpr" and name not in self.unaligned:
                aligned[path] = [["tt.divisibility", 16]]
            return given

        names = [argument.name for argument in self.kernel.params]
        signature = {name: type_of((i,), name, self.types.get(name, "constexpr")) for i, name in enumerate(names)}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        return triton.compile(source, target=target, options={"num_warps": self.warps, "num_stages": self.stages})


@dataclass(frozen=True)
class Measured:
    """Counts of one compiled kernel. Bytes are of one thread, in one turn of the main loop."""

    loop: int  # instructions
    per_weight: float
    wide_bytes: int  # by global loads of 16 bytes
    narrow_bytes: int  # by narrower ones
    shared_store_bytes: int
    spills: int  # bytes of stack and local memory
    registers: int
    shared: int
    blocks: int  # that fit on one multiprocessor
    products: str  # which matrix instruction


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def _main_loop(sass: str) -> list[str]:
    """The instructions of the innermost loop with a matrix product, else of the longest loop, else all of them."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            lines.append(code[1].strip())
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"^BRA.*?(\.L_x_\d+)", line)
        if target and labels.get(target[1], end) < end:  # a jump to itself pads the end
            loops.append(lines[labels[target[1]] : end + 1])
    products = [loop for loop in loops if any("MMA" in line for line in loop)]
    return min(products, key=len) if products else max(loops, key=len, default=lines)


def _width(instruction: str) -> int:
    """Bytes a thread moves: LDG.E.128, STS.U16, STSM.16.M88.4 (four 8x8 matrices: 16 bytes a thread)."""
    if matrices := re.match(r"STSM\S*\.([124])\b", instruction):
        return 4 * int(matrices[1])
    size = re.search(r"\.(128|64|U?16|U?8)\b", instruction.split()[0])
    return int(size[1].strip("U")) // 8 if size else 4


def measure(build: Build, capability: int) -> Measured:
    """Compile for an NVIDIA architecture and count."""
    compiled = build.compile(GPUTarget("cuda", capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        loop = _main_loop(_tool("nvdisasm", "-c", file.name))
        usage = _tool("cuobjdump", "-res-usage", file.name)
    found = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}  # type: ignore[index]
    # reason: the three are printed for every kernel; a missing one should fail loudly
    loads = [_width(line) for line in loop if line.startswith(("LDG.", "LDGSTS."))]
    stores = sum(_width(line) for line in loop if line.startswith(("STS", "STTM")))
    threads = 32 * build.warps
    operations = (re.split(r"[.\s]", line)[0] for line in loop)
    products = Counter(name for name in operations if "MMA" in name)
    return Measured(
        loop=len(loop),
        per_weight=len(loop) * threads / build.weights if build.weights else 0.0,
        wide_bytes=sum(width for width in loads if width == 16),
        narrow_bytes=sum(width for width in loads if width < 16),
        shared_store_bytes=stores,
        spills=found["STACK"] + found["LOCAL"],
        registers=found["REG"],
        shared=compiled.metadata.shared,
        blocks=_blocks(capability, found["REG"], compiled.metadata.shared, build.warps),
        products=products.most_common(1)[0][0] if products else "",
    )


def _blocks(capability: int, registers: int, shared: int, warps: int) -> int:
    """Blocks that fit on one multiprocessor: registers go out by 256 a warp, each block reserves 1 KiB of shared."""
    most_warps, kilobytes, most = _LIMITS[capability]
    per_warp = -(-registers * 32 // 256) * 256
    return min(most, most_warps // warps, _REGISTERS // (per_warp * warps), kilobytes * 1024 // (shared + 1024))


def _multiply(packing: Packing, shape: Tile, after: str = "", root: bool = False, tail: Tail | None = None) -> Build:
    columns = tile_k(packing)
    pointers = {"codes": "*i16", "scales": "*i32", "x": "*fp16", "sums": "*fp32", "y": "*fp32"}
    sizes = dict.fromkeys(("rows", "n", "n_kept", "k_kept", "rows_kept", "tiles_per_part"), "i32")
    unroll = max(1, shape.turn // columns)
    return Build(
        name=f"multiply {packing.name} rows {shape.block_m}{after}",
        kernel=triton_matmul.multiply_kernel,
        types={**pointers, **sizes, "root": _ROOT if root else None, "tail": tail},
        constants={
            **constants(packing, torch.bfloat16, ptx=True),
            "BLOCK_N": shape.block_n,
            "BLOCK_M": shape.block_m,
            "WARPS": shape.warps,
            "UNROLL": unroll,
            "PERMUTED": shape.permuted,
        },
        warps=shape.warps,
        stages=shape.stages,
        weights=shape.block_n * columns * unroll,
        unaligned=("rows", "rows_kept", "tiles_per_part", "tokens", "heads", "kv_heads", "pieces"),
    )


def multiply_builds(capability: int) -> Iterator[Build]:
    """The packed product for every packing and number of rows, as `triton_packed` would launch it."""
    chip = Chip(divmod(capability, 10), 132)
    for bits in BITS:
        for group in (*GROUP_SIZES, None):
            packing = Packing(bits, group)
            for shape in dict.fromkeys(triton_tiles.tile(chip, packing, rows) for rows in triton_tiles.ROWS):
                yield _multiply(packing, shape)


def _dequantize(packing: Packing) -> Build:
    warps = dequantize_warps(packing)
    sizes = dict.fromkeys(("first", "n", "k", "n_kept", "k_kept"), "i32")
    return Build(
        name=f"dequantize {packing.name}",
        kernel=triton_matmul.dequantize_kernel,
        types={"codes": "*i16", "scales": "*i32", "y": "*bf16", **sizes},
        constants={
            **constants(packing, torch.bfloat16, ptx=True),
            "BLOCK_N": layout_of(packing).chunk_n * warps,
            "WARPS": warps,
        },
        warps=warps,
        weights=layout_of(packing).chunk_n * warps * tile_k(packing),
    )


def matmul_builds(capability: int) -> Iterator[Build]:
    """All of `triton_matmul`."""
    yield from multiply_builds(capability)
    for bits in BITS:
        yield _dequantize(Packing(bits, 128))
    into = {"x": "*bf16", "into": _OPERAND, "k": "i32", "x_stride": "i32"}
    yield Build("prepare", triton_activation.prepare_kernel, into, {"TILES": 8}, unaligned=("rows_kept",))
    sums = {"parts": "*fp32", "y": "*bf16", "count": "i32", "size": "i32"}
    yield Build("reduce", triton_matmul.reduce_kernel, sums, {"BLOCK": 1024}, unaligned=("count",))


def choose_builds() -> Iterator[Build]:
    """The choice of a token, of the 128,256 of Llama-3.1."""
    pointers = {"logits": "*bf16", "best": "*fp32", "index": "*i32", "lengths": "*i32"}
    partial = {**pointers, "seed": "*i64", "temperature": "*fp32", "stride": "i32", "vocab": "i32"}
    for name, draw in (("likeliest", False), ("draw", True)):
        yield Build(f"{name} of a block", partial_kernel, partial, {"DRAW": draw, "BLOCK": BLOCK})
    last = {**pointers, "chosen": "*i64", "tokens": "*i64", "blocks": "i32", "step": "i32"}
    del last["logits"]
    yield Build("choice", choose_kernel, last, {"NONE": -1, "BLOCKS": 128}, unaligned=("blocks", "step"))


def _tails(block: int, rows: int) -> Iterator[tuple[str, bool, Tail]]:
    """What follows the products of a layer: name, whether x came from a norm, and the tail."""
    tiles = max(1, block // 128)
    normed = triton_fused.Normed("*bf16", "i32", "*bf16", "*fp32", _OPERAND, rows, tiles)
    yield "add", False, Tail(triton_fused.add_tail, "*i32", normed, 128 * tiles, 1)
    gated = triton_fused.Gated("i32", _OPERAND, rows, tiles, tl.bfloat16)
    yield "SiLU", True, Tail(triton_fused.silu_tail, "*i32", gated, 128 * tiles, 2)
    for name, stored, scales in (("rotate", "*bf16", None), ("rotate int8", "*i8", "*fp32")):
        tables = ("*bf16", "*bf16", "*i32", "*bf16")
        sizes = ("i32", "i32", "i32", "i64", "i64", "i64", "fp32", 64, 64, rows)
        rotated = triton_fused.Rotated(None, None, None, *tables, stored, stored, scales, scales, *sizes)
        yield name, True, Tail(triton_fused.rope_tail, "*i32", rotated, 128, 1)


def decode_builds(capability: int) -> Iterator[Build]:
    """The five launches of a layer of Llama-3.1-8B: 32 heads, 8 for keys and values, of 128; O and down are alike."""
    packing = Packing(4, 128)
    shape = triton_tiles.tile(Chip(divmod(capability, 10), 132), packing, 8)
    for rows in (1, 8):
        for name, root, tail in _tails(shape.block_n, rows):
            yield _multiply(packing, shape, f" {name} {rows}", root, tail)
    for name, stored in (("", "*bf16"), (" int8", "*i8")):
        scales = None if name == "" else "*fp32"
        cache = {"keys": stored, "values": stored, "key_scales": scales, "value_scales": scales}
        strides = dict.fromkeys(("sequence_stride", "head_stride", "capacity"), "i64")
        for tokens in (1, 8):
            attend: dict[str, Any] = {
                "query": "*bf16",
                "lengths": "*i32",
                "outputs": "*fp32",
                "stats": "*fp32",
                **cache,
                **strides,
            }
            attend |= {"window": "i32", "scale": "fp32", "counters": "*i32", "into": _OPERAND}
            sizes = {"TOKENS": tokens, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_Q": max(8, 4 * tokens)}
            flags = {**sizes, "BLOCK_K": BLOCK_K, "WINDOW": False, "DOT": tl.bfloat16}
            warps = attend_warps(max(8, 4 * tokens))
            flags |= combination(tokens, 4 * 128, 128, 32, warps)
            kernel = triton_attention.attend_kernel
            yield Build(f"attend{name} to {tokens}", kernel, attend, flags, warps, unaligned=("rows_kept",))


def builds(capability: int) -> Iterator[Build]:
    """Every kernel."""
    yield from matmul_builds(capability)
    yield from choose_builds()
    yield from decode_builds(capability)


def amd(build: Build) -> str:
    """Compile for AMD with plain operations in place of PTX; which matrix instructions came out."""
    portable = replace(build, constants={**build.constants, "ASM": False} if "ASM" in build.constants else {})
    assembly = portable.compile(GPUTarget("hip", AMD, 64)).asm["amdgcn"]
    return str(Counter(re.findall(r"v_mfma_\w+|v_dot\w+", assembly)).most_common(1))


HEADER = """| kernel | sm | instr/weight | loop | product | B in 16-byte loads | B in narrower | B to shared \
| registers | spilled B | shared KiB | blocks/SM |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def row(build: Build, capability: int) -> str:
    """One line of the table."""
    m = measure(build, capability)
    ratio = f"{m.per_weight:.2f}" if build.weights else ""
    return (
        f"| {build.name} | {capability} | {ratio} | {m.loop} | {m.products} | {m.wide_bytes} | {m.narrow_bytes} "
        f"| {m.shared_store_bytes} | {m.registers} | {m.spills} | {m.shared / 1024:.0f} | {m.blocks} |\n"
    )


def table(capabilities: tuple[int, ...] = CAPABILITIES) -> str:
    """The report, in Markdown."""
    rows = (row(build, capability) for capability in capabilities for build in builds(capability))
    return f"Triton {triton.__version__}.\n\n{HEADER}{''.join(rows)}"


def _main(arguments: list[str]) -> None:
    if len(arguments) == 1 and arguments[0].endswith(".md"):
        path = Path(arguments[0])
        before, mark, rest = path.read_text("utf-8").partition(MARK)
        path.write_text(f"{before}{mark}\n{table()}{MARK}{rest.partition(MARK)[2]}", "utf-8")
    else:
        sys.stdout.write(table(tuple(int(argument) for argument in arguments) or CAPABILITIES))


if __name__ == "__main__":
    _main(sys.argv[1:])
