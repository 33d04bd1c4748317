"""Test the inline PTX that converts cached codes with a small emulator: every code becomes exactly its number."""

import re

import pytest
import torch

pytest.importorskip("triton")

from mycli.runtime.kernels.triton import cache_codes  # noqa: E402  (reason: only where Triton is installed)

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
BYTES = torch.arange(256, dtype=torch.uint8)


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(dtype)


def run(text: str, inputs: list[int], outputs: int, dtype: torch.dtype) -> list[list[float]]:
    """Execute the assembly on 32-bit registers, inputs numbered after outputs; return two numbers of each output."""
    registers = {f"${outputs + place}": value for place, value in enumerate(inputs)}
    for name, operands in re.findall(r"^(\w+)\.(?!reg)[\w.]+ ([^;]*);", text, flags=re.M):
        target, *names = (one.strip() for one in operands.split(","))
        given = [int(one, 0) if one[0].isdigit() else registers[one] for one in names]
        if name == "lop3":
            a, b, c, table = given
            result = sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
        elif name == "prmt":
            result = sum(((given[1] << 32 | given[0]) >> 8 * (given[2] >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
        elif name in ("fma", "add"):
            x, y, *z = (halves(one, dtype).double() for one in given)
            exact = x * y + z[0] if z else x + y
            low, high = exact.to(dtype).view(torch.uint16).tolist()
            result = high << 16 | low
        else:
            a, b = (*given, 0)[:2]
            result = {"mov": a, "shr": a >> b, "and": a & b, "xor": a ^ b}[name]
        registers[target] = result
    return [halves(registers[f"${place}"], dtype).double().tolist() for place in range(outputs)]


def words(rows: torch.Tensor) -> list[int]:
    return [int.from_bytes(bytes(row.tolist()), "little") for row in rows]


def signed(codes: torch.Tensor, bits: int) -> list[float]:
    half = 1 << bits - 1
    return ((codes.double() + half) % (2 * half) - half).tolist()


@pytest.mark.parametrize("kind", DTYPES)
def test_every_int8_code(kind: str) -> None:
    for row in BYTES.view(-1, 4):
        first, second = run(getattr(cache_codes, f"INT8_{kind}"), words(row[None]), 2, DTYPES[kind])
        assert first + second == signed(row, 8)


def test_every_int8_code_with_the_bias() -> None:
    for row in BYTES.view(-1, 4):
        first, second = run(cache_codes.INT8_BIASED, words(row[None]), 2, torch.float16)
        assert [one - cache_codes.INT8_BIAS.value for one in first + second] == signed(row, 8)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_pair_of_int4_codes(kind: str) -> None:
    for row in BYTES.view(-1, 4):
        a, b, c, d = run(getattr(cache_codes, f"INT4_{kind}"), words(row[None]), 4, DTYPES[kind])
        assert a + b == signed(row & 15, 4) and c + d == signed(row >> 4, 4)
