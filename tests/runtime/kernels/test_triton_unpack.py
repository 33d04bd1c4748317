"""Test the inline PTX of the unpacking with a small emulator: each code is found where the layout stores it."""

import re
from types import ModuleType

import numpy as np
import pytest

from mycli.runtime.kernels.triton.product.weight_layout import TABLE_UNIT, Layout, layout_of
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.scheme import INTEGER_TABLES, Codes, Packing

pytest.importorskip("triton")

from mycli.runtime.kernels.triton.product import tables  # noqa: E402  (reason: only where Triton is installed)
from mycli.runtime.kernels.triton.product import unpack as triton_unpack  # noqa: E402  (reason: only where Triton is installed)

OUTPUTS = {8: 2, 4: 4, 3: 16, 2: 8}
TEXT = {8: triton_unpack.ASM8, 4: triton_unpack.ASM4, 3: triton_unpack.ASM3, 2: triton_unpack.ASM2}


def run(text: str, inputs: list[int], outputs: int) -> list[int]:
    """Execute moves, shifts, logic and permutations of 32-bit registers; inputs are numbered after outputs."""
    registers = {f"${outputs + place}": value for place, value in enumerate(inputs)}

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for operation, operands in re.findall(r"^(\w+)\.[bu]32 ([^;]*);", text, flags=re.M):
        target, *names = (name.strip() for name in operands.split(","))
        a, b, c, *_ = (*(value(name) for name in names), 0, 0)
        if operation == "mov":
            result = a
        elif operation == "and":
            result = a & b
        elif operation == "shl":
            result = a << b & 0xFFFFFFFF
        elif operation == "shr":
            result = a >> b
        elif operation == "lop3":
            table = value(names[3])
            result = sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
        else:
            assert operation == "prmt"
            both = b << 32 | a
            chosen = [both >> 8 * (c >> 4 * i & 7) & 0xFF for i in range(4)]
            # Bit 3 of a selector repeats the sign of the byte (PTX ISA, prmt).
            chosen = [255 * (byte >> 7) if c >> 4 * i & 8 else byte for i, byte in enumerate(chosen)]
            result = sum(byte << 8 * i for i, byte in enumerate(chosen))
        registers[target] = result
    return [registers[f"${place}"] for place in range(outputs)]


def field(words: list[int], layout: Layout, row: int, half: int) -> int:
    word, shift = layout.fields[row][half]
    if word is None:
        return sum((words[bit] >> shift & 1) << bit for bit in range(3))
    return words[word] >> shift & (1 << layout.bits) - 1


def step(bits: int, row: int) -> int:
    """Return the power of two that the kernels divide by: `_row_steps` in Python."""
    return {8: 1, 4: 16**row, 3: 8 ** (row // 3), 2: 4**row}[bits]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_assembly_finds_every_code(bits: int) -> None:
    layout = layout_of(Packing(bits, 128))
    halves = len(layout.fields[0])
    generator = np.random.default_rng(bits)
    for _ in range(40):
        words = [int(word) for word in generator.integers(0, 1 << 32, layout.words)]
        results = run(TEXT[bits], words, OUTPUTS[bits])
        for place, result in enumerate(results):
            half, row = divmod(place, len(layout.fields)) if halves == 2 else (0, place)
            pair = np.array([result], dtype=np.uint32).view(np.float16)
            for side in range(2):
                code = field([word >> 16 * side & 0xFFFF for word in words], layout, row, half)
                assert pair[side] == 1024 + step(bits, row) * code, (row, half, side)


@pytest.mark.parametrize("codes", tables._ASM4.value)
def test_assembly_finds_every_entry_of_a_table(codes: Codes) -> None:
    """Integers come out as the codes of int8 do, 1024 and 128 more than they are; floats divided by their unit."""
    packing = Packing(4, 32, codes=codes)
    values = code_table(packing).double().numpy()
    expected = values + 1024 + 128 if codes in INTEGER_TABLES else (values / TABLE_UNIT[codes]).astype(np.float16)
    layout = layout_of(packing)
    words = [code * 0x11111111 for code in range(16)]
    words += [int(word) for word in np.random.default_rng(0).integers(0, 1 << 32, 60)]
    for word in words:
        for place, result in enumerate(run(tables._ASM4.value[codes], [word], 4)):
            half, row = divmod(place, 2)
            pair = np.array([result], dtype=np.uint32).view(np.float16)
            for side in range(2):
                assert pair[side] == expected[field([word >> 16 * side & 0xFFFF], layout, row, half)], (row, half, side)


CLOBBERING = [(str(bits), bits, text, triton_unpack) for bits, text in TEXT.items()]
CLOBBERING += [(codes, 4, text, tables) for codes, text in tables._ASM4.value.items()]
CLOBBERING += [("e4m3", 8, tables.ASM_E4M3, tables), ("e5m2", 8, tables.ASM_E5M2, tables)]


@pytest.mark.parametrize(
    ("bits", "text", "module"), [one[1:] for one in CLOBBERING], ids=[one[0] for one in CLOBBERING]
)
def test_no_output_may_share_a_register_with_an_input_that_is_read_later(
    bits: int, text: str, module: ModuleType
) -> None:
    """The constraint "&" declares it; otherwise both may share a register (GCC manual, early clobber)."""
    constraints = getattr(module, f"_OUT{bits}").value.split(",")[: OUTPUTS[bits]]
    outputs, inputs = (
        [f"${place}" for place in range(OUTPUTS[bits])],
        [f"${place}" for place in range(OUTPUTS[bits], 19)],
    )
    written: set[str] = set()
    for operands in re.findall(r"^\w+\.[bu]32 ([^;]*);", text, flags=re.M):
        target, *read = (name.strip() for name in operands.split(","))
        if set(read) & set(inputs):
            assert all(constraints[outputs.index(one)].startswith("=&") for one in written)
        written |= {target} & set(outputs)
    assert written == set(outputs)
