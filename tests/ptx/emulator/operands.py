"""Translate PTX operands to C++ expressions of one lane: registers by scope, constants, special registers, addresses.

A register is an array of 32 lanes of unsigned numbers of its size; each instruction says how to interpret them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

BYTES: Mapping[str, int] = {
    **dict.fromkeys(("b8", "u8", "s8", "pred"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
}
FLOATS = ("f32", "f64", "f16", "bf16")
UNSIGNED: Mapping[int, str] = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_FROM = {"f32": "as_f32((u32){})", "f64": "as_f64({})", "f16": "as_f16((u16){})", "bf16": "as_bf16((u16){})"}
_INTO = {"f32": "from_f32({})", "f64": "from_f64({})", "f16": "from_f16({})", "bf16": "from_bf16({})"}
_SPECIAL: Mapping[str, str] = {
    "%tid.x": "CURRENT->number*32+l",
    "%ctaid.x": "CURRENT->program->x",
    "%ctaid.y": "CURRENT->program->y",
    "%ctaid.z": "CURRENT->program->z",
    "%ntid.x": "THREADS",
    "%nctaid.x": "GRID_X",
    "%nctaid.y": "GRID_Y",
    "%nctaid.z": "GRID_Z",
    "%laneid": "l",
    "%warpid": "CURRENT->number",
}


class UnknownInstruction(Exception):
    """The PTX contains something that the emulator does not support, named in the message."""


@dataclass(frozen=True)
class Register:
    """The register of 32 lanes. name: in C++; size: bytes per lane."""

    name: str
    size: int


def c_type(kind: str) -> str:
    """Return the C++ type for a PTX type other than 16-bit floats: unsigned for PTX's untyped bits."""
    return kind if kind[0] in "usf" and kind not in ("f16", "f16x2", "f32x2") else UNSIGNED[BYTES[kind]]


def bits(size: int) -> str:
    """Return the untyped type of `size` bytes."""
    return f"b{8 * size}"


class Operands:
    """The names of one function. symbols: addresses in C++ by name; parameters: their locations in C++."""

    def __init__(self, symbols: Mapping[str, str], parameters: Mapping[str, str]) -> None:
        self.symbols, self.parameters = dict(symbols), dict(parameters)
        self.scopes: list[dict[str, Register]] = [{}]

    def register(self, name: str) -> Register | None:
        """Return the innermost register of that name."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def lanes(self, name: str) -> str:
        """Return the C++ array of a register; raises UnknownInstruction if there is none."""
        found = self.register(name)
        if found is None:
            raise UnknownInstruction(f"operand {name}")
        return found.name

    def value(self, operand: str, kind: str) -> str:
        """Return the operand of one lane as a number of `kind`."""
        if operand.startswith("!"):
            return f"(!{self.value(operand[1:], kind)})"
        if (found := self.register(operand)) is not None:
            lane = f"{found.name}[l]"
            if kind == "pred":
                return lane
            return _FROM[kind].format(lane) if kind in _FROM else f"(({c_type(kind)}){lane})"
        if operand in _SPECIAL:
            return f"(({c_type(kind)})({_SPECIAL[operand]}))"
        if operand in self.symbols:
            return f"((u64){self.symbols[operand]})"
        return self._constant(operand, kind)

    def _constant(self, operand: str, kind: str) -> str:
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            return f"as_f32(0x{operand[2:]}u)" if kind == "f32" else f"0x{operand[2:]}u"
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", operand):
            return f"as_f64(0x{operand[2:]}ull)"
        if not re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
            raise UnknownInstruction(f"operand {operand}")
        number = operand.rstrip("U")
        if kind in ("f16", "bf16"):
            return _FROM[kind].format(number)
        if kind in ("pred", "f32"):
            return number if kind == "pred" else f"((f32){number})"
        return f"(({c_type(kind)}){number}ll)"

    def store(self, target: str, kind: str, expression: str) -> str:
        """Return a statement that writes a number of `kind` to a register, extended to its size; empty for "_"."""
        if target == "_":
            return ""
        found = self.register(target)
        if found is None:
            raise UnknownInstruction(f"target {target}")
        if kind == "pred":
            return f"{found.name}[l]={expression};"
        if kind in _INTO:
            expression = _INTO[kind].format(expression)
        elif BYTES[kind] < 8:
            expression = f"({'s64' if kind[0] == 's' else 'u64'})({c_type(kind)})({expression})"
        return f"{found.name}[l]=({UNSIGNED[found.size]})({expression});"


def address(operand: str) -> tuple[str, int]:
    """Return base and offset of "[base+offset]"."""
    match = re.fullmatch(r"(\S+?)\s*(?:\+\s*(-?\d+))?", operand.strip()[1:-1].strip())
    if match is None:
        raise UnknownInstruction(f"address {operand}")
    return match[1], int(match[2] or 0)


def braced(operand: str) -> list[str]:
    """Return the registers of "{a, b}", or a single register."""
    return [one.strip() for one in operand.strip("{} \n\t").split(",")]
