"""Translate memory instructions of one lane: loads, stores, atomics, asynchronous copies, prefetches.

Addresses of global memory are the host's; those of shared memory are offsets into a program's. Every access must be
aligned and within the shared memory of the launch. Each function returns the C++ statement of one lane.
"""

import re
from collections.abc import Callable, Mapping

from tests.ptx.emulator.operands import BYTES, UNSIGNED, Operands, UnknownInstruction, address, bits, braced, c_type
from tests.ptx.emulator.parse import Instruction

_ATOMIC = {
    "add": "old+given",
    "min": "std::min(old,given)",
    "max": "std::max(old,given)",
    "exch": "given",
    "and": "old&given",
    "or": "old|given",
}


def _pointer(o: Operands, i: Instruction, operand: str, size: int) -> str:
    """Return the checked address of `size` bytes."""
    base, offset = address(operand)
    spaces = [part.split("::")[0] for part in i.parts[1:]]  # an order and a scope may precede it
    space = next((space for space in spaces if space in ("global", "shared", "local")), "")
    if space == "global":
        return f"in_global({o.value(base, 'b64')}+({offset}),{size})"
    if space == "shared":
        start = o.value(base, "u32") if o.register(base) else o.symbols[base]
        return f"in_shared((u32)({start})+({offset}),{size})"
    if space == "local":
        return f"(u8*)((u64){o.value(base, 'b64')}+({offset}))"
    raise UnknownInstruction(i.text)


def _parameter(o: Operands, i: Instruction, operand: str) -> str:
    """Return where a parameter is stored: of the kernel, of this function, or of a call in preparation."""
    base, offset = address(operand)
    return f"((u8*){o.parameters.get(base, f'&{base}_[l]')}+({offset}))"


def vector(i: Instruction) -> int:
    """Return the number of elements that a lane moves."""
    return next((int(part[1:]) for part in i.parts if re.fullmatch(r"v[248]", part)), 1)


def _load(o: Operands, i: Instruction) -> str:
    size, count = BYTES[i.kind], vector(i)
    source = i.operands[1]
    place = _parameter(o, i, source) if i.parts[1] == "param" else _pointer(o, i, source, size * count)
    kind = i.kind if i.kind[0] in "us" else bits(size)
    values = (f"*({c_type(kind)}*)(at+{size * n})" for n in range(count))
    registers = braced(i.operands[0])
    return f"u8*at={place};" + "".join(o.store(r, kind, v) for r, v in zip(registers, values, strict=True))


def _store(o: Operands, i: Instruction) -> str:
    size, count = BYTES[i.kind], vector(i)
    target, registers = i.operands[0], braced(i.operands[1])
    place = _parameter(o, i, target) if i.parts[1] == "param" else _pointer(o, i, target, size * count)
    word = UNSIGNED[size]
    values = (o.value(one, bits(size)) for one in registers)
    return f"u8*at={place};" + "".join(f"*({word}*)(at+{size * n})=({word}){v};" for n, v in enumerate(values))


def _atomic(o: Operands, i: Instruction) -> str:
    """Translate atom and red: other programs may run before and after."""
    returns = i.name == "atom"
    place, given = i.operands[1 if returns else 0], i.operands[2 if returns else 1]
    how = i.parts[-2]
    if how not in _ATOMIC or i.parts[1] != "global":
        raise UnknownInstruction(i.text)
    kind, (base, offset) = c_type(i.kind), address(place)
    pointer = f"({kind}*)in_global({o.value(base, 'b64')}+({offset}),{BYTES[i.kind]})"
    text = f"{kind}*at={pointer};{kind} old=*at,given={o.value(given, i.kind)};*at={_ATOMIC[how]};"
    return text + (o.store(i.operands[0], i.kind, "old") if returns else "")


def _copy(o: Operands, i: Instruction) -> str:
    """Translate cp.async.ca and .cg: TARGET, SOURCE, bytes and the number of bytes to read; the rest become zeros."""
    if i.parts[:3] == ("cp", "async", "bulk"):
        return _prefetch(o, i)
    (to, to_offset), (source, offset) = (address(one) for one in i.operands[:2])
    target = o.value(to, "u32") if o.register(to) else o.symbols[to]
    kept = o.value(i.operands[3], "u32") if len(i.operands) > 3 else i.operands[2]
    start = f"(u64)({o.value(source, 'b64')}+({offset}))"
    return f"copy_later(l,(u32)({target})+({to_offset}),{start},{i.operands[2]},{kept});"


def _prefetch(o: Operands, i: Instruction) -> str:
    """Translate a prefetch: its bytes must be readable, and are read."""
    if i.parts[3] != "prefetch":
        raise UnknownInstruction(i.text)
    base, offset = address(i.operands[0])
    size = o.value(i.operands[1], "u32")
    start = f"u8*at=(u8*)({o.value(base, 'b64')}+({offset}));u32 size={size};"
    check = 'if((u64)at%16||size%16||!size)fail("a prefetch of nothing, or misaligned");'
    return start + check + "volatile u8 read=at[0];read=at[size-1];"


MEMORY: Mapping[str, Callable[[Operands, Instruction], str]] = {
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": _copy,
}
