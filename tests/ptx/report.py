"""Report what the Triton kernels compile to, counted without a GPU.

python -m tests.ptx.report [80 90 ..]                the table, for these compute capabilities or all
python -m tests.ptx.report docs/results/kernels.md   that page, for all

Compiles each kernel for each architecture, disassembles it with the tools in Triton's own package and counts the
instructions of its main loop, the width of its loads, spills, registers, shared memory and how many blocks fit on a
multiprocessor. The limits are in the tests.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from tests.ptx.build import Build
from tests.ptx.builds import builds

CAPABILITIES = (80, 86, 89, 90, 100, 120)
AMD = "gfx942"
# Per multiprocessor: warps, KiB of shared memory, blocks (CUDA programming guide, compute capabilities).
_LIMITS = {80: (64, 164, 32), 86: (48, 100, 16), 89: (48, 100, 24), 90: (64, 228, 32), 100: (64, 228, 32)}
_LIMITS[120] = (48, 100, 32)
_REGISTERS = 65536


@dataclass(frozen=True)
class Measured:
    """The counts of one compiled kernel. Bytes are of one thread, in one iteration of the main loop."""

    loop: int  # instructions
    per_weight: float
    wide_bytes: int  # by global loads of 16 bytes
    narrow_bytes: int  # by narrower loads
    shared_store_bytes: int
    spills: int  # bytes of stack and local memory
    registers: int
    shared: int
    blocks: int  # that fit on one multiprocessor
    products: str  # which matrix instruction


def _tool(name: str, option: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), option, file.name], capture_output=True, text=True, check=True).stdout


def _main_loop(sass: str) -> list[str]:
    """Return the instructions of the innermost loop with a matrix product, else of the longest loop, else all."""
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
    """Return the bytes a thread moves: LDG.E.128, STS.U16, STSM.16.M88.4 (four 8x8 matrices: 16 bytes a thread)."""
    if matrices := re.match(r"STSM\S*\.([124])\b", instruction):
        return 4 * int(matrices[1])
    size = re.search(r"\.(128|64|U?16|U?8)\b", instruction.split()[0])
    return int(size[1].strip("U")) // 8 if size else 4


def _compile(build: Build, capability: int) -> tuple[int, bytes]:
    """Return the bytes of shared memory of the compiled kernel, and the kernel."""
    compiled = build.compile(GPUTarget("cuda", capability, 32))
    return compiled.metadata.shared, compiled.asm["cubin"]


def _usage(cubin: bytes) -> dict[str, int]:
    """Return the registers, and the bytes of stack and local memory."""
    usage = _tool("cuobjdump", "-res-usage", cubin)
    # The three are printed for every kernel; a missing one should fail loudly.
    return {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def spills(build: Build, capability: int) -> int:
    """Compile for an NVIDIA architecture and return the bytes spilled; `measure` takes half as long again."""
    usage = _usage(_compile(build, capability)[1])
    return usage["STACK"] + usage["LOCAL"]


def conversions(build: Build, capability: int) -> int:
    """Count the main loop's permutations, logic, shifts, and conversions and arithmetic of 16-bit numbers."""
    loop = _main_loop(_tool("nvdisasm", "-c", _compile(build, capability)[1]))
    return sum(bool(re.match(r"(PRMT|LOP3|SHF|I2FP?|HADD2|HMUL2|HFMA2)\b", line)) for line in loop)


def measure(build: Build, capability: int) -> Measured:
    """Compile for an NVIDIA architecture and count."""
    shared, cubin = _compile(build, capability)
    loop, found = _main_loop(_tool("nvdisasm", "-c", cubin)), _usage(cubin)
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
        shared=shared,
        blocks=_blocks(capability, found["REG"], shared, build.warps),
        products=products.most_common(1)[0][0] if products else "",
    )


def _blocks(capability: int, registers: int, shared: int, warps: int) -> int:
    """Return the blocks that fit on a multiprocessor: a warp takes registers by 256, a block 1 KiB of shared memory."""
    most_warps, kilobytes, most = _LIMITS[capability]
    per_warp = -(-registers * 32 // 256) * 256
    return min(most, most_warps // warps, _REGISTERS // (per_warp * warps), kilobytes * 1024 // (shared + 1024))


def amd(build: Build) -> str:
    """Compile for AMD with plain operations in place of PTX; return the matrix instructions of the result."""
    portable = replace(build, constants={**build.constants, "ASM": False} if "ASM" in build.constants else {})
    assembly = portable.compile(GPUTarget("hip", AMD, 64)).asm["amdgcn"]
    return str(Counter(re.findall(r"v_mfma_\w+|v_dot\w+", assembly)).most_common(1))


PAGE = """# Compiled code of the Triton kernels

Instructions, registers and shared memory of every kernel, counted without a GPU by
`python -m tests.ptx.report docs/results/kernels.md`. The columns are explained in
[kernels.md](../kernels.md#compiled-code).

"""
HEADER = """| kernel | sm | instr/weight | loop | product | B in 16-byte loads | B in narrower | B to shared \
| registers | spilled B | shared KiB | blocks/SM |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def row(build: Build, capability: int) -> str:
    """Return one line of the table."""
    m = measure(build, capability)
    ratio = f"{m.per_weight:.2f}" if build.weights else ""
    return (
        f"| {build.name} | {capability} | {ratio} | {m.loop} | {m.products} | {m.wide_bytes} | {m.narrow_bytes} "
        f"| {m.shared_store_bytes} | {m.registers} | {m.spills} | {m.shared / 1024:.0f} | {m.blocks} |\n"
    )


def table(capabilities: tuple[int, ...] = CAPABILITIES) -> str:
    """Return the report in Markdown."""
    rows = (row(build, capability) for capability in capabilities for build in builds(capability))
    made = datetime.now(UTC).date().isoformat()
    return f"Triton {triton.__version__}. Made {made}.\n\n{HEADER}{''.join(rows)}"


def _main(arguments: list[str]) -> None:
    if len(arguments) == 1 and arguments[0].endswith(".md"):
        Path(arguments[0]).write_text(PAGE + table(), "utf-8")
    else:
        sys.stdout.write(table(tuple(int(argument) for argument in arguments) or CAPABILITIES))


if __name__ == "__main__":
    _main(sys.argv[1:])
