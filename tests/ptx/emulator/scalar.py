"""Translate instructions of one lane that touch no memory: arithmetic, logic, conversion (PTX ISA, chapter 9.7).

Each function returns the C++ statement of one lane. Floats are computed in fp32 and rounded once; approximations
(`ex2`, `rsqrt`, ..) are as exact as the host's.
"""

from collections.abc import Callable, Mapping

from tests.ptx.emulator.operands import BYTES, FLOATS, Operands, UnknownInstruction, bits, braced, c_type
from tests.ptx.emulator.parse import Instruction

_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = {"lt": "<", "gt": ">", "le": "<=", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARED |= {"lo": "<", "hi": ">", "ls": "<=", "hs": ">="}
_ROUNDED = {"rzi": "trunc", "rni": "nearbyint", "rmi": "floor", "rpi": "ceil"}
_FUNCTIONS = {
    "ex2": "exp2f({})",
    "lg2": "log2f({})",
    "rsqrt": "1.0f/sqrtf({})",
    "rcp": "1.0f/{}",
    "sqrt": "sqrtf({})",
    "tanh": "tanhf({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
}


def _unknown(instruction: Instruction) -> UnknownInstruction:
    return UnknownInstruction(instruction.text)


def _wide(kind: str) -> str:
    return "s64" if kind[0] == "s" else "u64"


def _move(o: Operands, i: Instruction) -> str:
    target, source = i.operands
    if target.startswith("{"):
        parts = braced(target)
        size = BYTES[i.kind] // len(parts)
        taken = (o.store(one, bits(size), f"whole>>{8 * size * place}") for place, one in enumerate(parts))
        return f"u64 whole={o.value(source, bits(BYTES[i.kind]))};" + "".join(taken)
    if source.startswith("{"):
        parts = braced(source)
        size = BYTES[i.kind] // len(parts)
        joined = (f"((u64)({o.value(one, bits(size))})<<{8 * size * place})" for place, one in enumerate(parts))
        return o.store(target, i.kind, "|".join(joined))
    return o.store(target, i.kind, o.value(source, i.kind))


def _pairs(o: Operands, i: Instruction, expression: str) -> str:
    """Apply `expression` of x, y (and z) to each half of f32x2, f16x2, bf16x2."""
    half = i.kind.removesuffix("x2")
    raw, lane = bits(BYTES[i.kind]), 8 * BYTES[half]
    word = "u32" if half == "f32" else "u16"
    names = "xyz"[: len(i.operands) - 1]
    whole = "".join(f"u64 {name}s={o.value(one, raw)};" for name, one in zip(names, i.operands[1:], strict=True))
    parts = []
    for shift in (0, lane):
        given = ",".join(f"as_{half}(({word})({name}s>>{shift}))" for name in names)
        types = ",".join(f"f32 {name}" for name in names)
        parts.append(f"((u64)from_{half}([]({types}){{return {expression};}}({given}))<<{shift})")
    return whole + o.store(i.operands[0], raw, "|".join(parts))


def _add(o: Operands, i: Instruction) -> str:
    """Translate add, sub and mul of one width; mul.wide, mul.hi; of mixed floats."""
    kind, sign = i.kind, _SIGNS[i.name]
    target, *given = i.operands
    if kind.endswith("x2"):
        return _pairs(o, i, f"x{sign}y")
    if kind in ("f16", "bf16") and i.parts[-2] == "f32":
        return o.store(target, "f32", f"{o.value(given[0], kind)}{sign}{o.value(given[1], 'f32')}")
    x, y = (o.value(one, kind) for one in given)
    if kind in FLOATS:
        return o.store(target, kind, f"{x}{sign}{y}")
    wide = _wide(kind)
    if "wide" in i.parts:
        return o.store(target, bits(2 * BYTES[kind]), f"({wide}){x}*({wide}){y}")
    if "hi" in i.parts:
        return o.store(target, kind, _high(kind, x, y))
    return o.store(target, kind, f"(u64){x}{sign}(u64){y}")


def _high(kind: str, x: str, y: str) -> str:
    """Return the upper half of a product."""
    if BYTES[kind] < 8:
        return f"({_wide(kind)}){x}*({_wide(kind)}){y}>>{8 * BYTES[kind]}"
    return f"(u64)(((__int128){x}*(__int128){y})>>64)" if kind[0] == "s" else f"(u64)(((u128){x}*(u128){y})>>64)"


def _mad(o: Operands, i: Instruction) -> str:
    target, *given = i.operands
    x, y = (o.value(one, i.kind) for one in given[:2])
    wide = _wide(i.kind)
    if "wide" in i.parts:
        into = bits(2 * BYTES[i.kind])
        return o.store(target, into, f"(u64)(({wide}){x}*({wide}){y})+(u64){o.value(given[2], into)}")
    z = o.value(given[2], i.kind)
    return o.store(target, i.kind, f"({_high(i.kind, x, y)})+{z}" if "hi" in i.parts else f"(u64){x}*(u64){y}+(u64){z}")


def _fma(o: Operands, i: Instruction) -> str:
    if i.kind.endswith("x2"):
        return _pairs(o, i, "fmaf(x,y,z)")
    last = "f32" if i.parts[-2] == "f32" else i.kind  # fma.rn.f32.f16 adds to an fp32
    x, y = (o.value(one, i.kind) for one in i.operands[1:3])
    function = "fma" if i.kind == "f64" else "fmaf"
    return o.store(i.operands[0], last, f"{function}({x},{y},{o.value(i.operands[3], last)})")


def _extreme(o: Operands, i: Instruction) -> str:
    """Translate min and max of two or three operands; for floats a number wins over NaN."""
    function = {"min": "smaller", "max": "larger"}[i.name]
    if "NaN" in i.parts or "xorsign" in i.parts or i.kind == "f64":
        raise _unknown(i)
    if i.kind.endswith("x2"):
        return _pairs(o, i, f"{function}(x,y)")
    x, y, *more = (o.value(one, i.kind) for one in i.operands[1:])
    if i.kind not in FLOATS:
        return o.store(i.operands[0], i.kind, f"std::{i.name}({x},{y})")
    found = f"{function}({x},{y})"
    return o.store(i.operands[0], i.kind, f"{function}({found},{more[0]})" if more else found)


def _divide(o: Operands, i: Instruction) -> str:
    x, y = (o.value(one, i.kind) for one in i.operands[1:])
    if i.kind in FLOATS:
        return o.store(i.operands[0], i.kind, f"{x}/{y}")
    return o.store(i.operands[0], i.kind, f"{y}==0?0:{x}{'/' if i.name == 'div' else '%'}{y}")


def _logic(o: Operands, i: Instruction) -> str:
    x, y = (o.value(one, i.kind) for one in i.operands[1:])
    return o.store(i.operands[0], i.kind, f"{x}{_LOGIC[i.name]}{y}")


def _one(o: Operands, i: Instruction) -> str:
    """Translate neg, abs, not, popc, clz."""
    x, kind = o.value(i.operands[1], i.kind), i.kind
    floating = {"neg": f"-({x})", "abs": f"std::fabs({x})"}
    whole = {"neg": f"(u64)0-(u64){x}", "abs": f"({x}<0?-{x}:{x})", "not": f"!{x}" if kind == "pred" else f"~{x}"}
    if i.name == "popc":
        return o.store(i.operands[0], "u32", f"__builtin_popcountll({x})")
    if i.name == "clz":
        return o.store(i.operands[0], "u32", f"({x}?__builtin_clzll({x})-{64 - 8 * BYTES[kind]}:{8 * BYTES[kind]})")
    return o.store(i.operands[0], kind, (floating if kind in FLOATS else whole)[i.name])


def _shift(o: Operands, i: Instruction) -> str:
    direction = {"shl": "left", "shr": "right"}[i.name]
    x, count = o.value(i.operands[1], i.kind), o.value(i.operands[2], "u32")
    return o.store(i.operands[0], i.kind, f"shift_{direction}<{c_type(i.kind)}>({x},{count})")


def _words(o: Operands, i: Instruction) -> str:
    """Translate lop3, prmt, bfe and bfi: functions of words; lop3's last operand is a truth table."""
    name = f"bfe_{i.kind}" if i.name == "bfe" else i.name
    if i.parts[1:] not in (("b32",), ("u32",), ("s32",)):
        raise _unknown(i)
    given = ",".join(o.value(one, "u32") for one in i.operands[1:])
    return o.store(i.operands[0], "b32", f"{name}({given})")


def _funnel(o: Operands, i: Instruction) -> str:
    low, high, count = (o.value(one, "u32") for one in i.operands[1:])
    if i.parts[2] != "wrap":
        raise _unknown(i)
    shifted = "both>>count" if i.parts[1] == "r" else "both<<count>>32"
    return f"u64 both=((u64){high}<<32)|{low};u32 count={count}&31;" + o.store(
        i.operands[0], "b32", f"(u32)({shifted})"
    )


def _select(o: Operands, i: Instruction) -> str:
    x, y = (o.value(one, i.kind) for one in i.operands[1:3])
    return o.store(i.operands[0], i.kind, f"{o.value(i.operands[3], 'pred')}?{x}:{y}")


def _compare(o: Operands, i: Instruction) -> str:
    how = i.parts[1]
    x, y = (o.value(one, i.kind) for one in i.operands[1:3])
    nan = f"(std::isnan({x})||std::isnan({y}))"
    if how in _COMPARED:
        found = f"({x}{_COMPARED[how]}{y})" + (f"&&!{nan}" if i.kind in FLOATS and how == "ne" else "")
    elif how in ("nan", "num"):
        found = nan if how == "nan" else f"!{nan}"
    elif how.endswith("u") and how[:-1] in _COMPARED:
        found = f"({nan}||({x}{_COMPARED[how[:-1]]}{y}))"
    else:
        raise _unknown(i)
    if i.parts[2] in _LOGIC:
        found = f"(({found})?1:0){_LOGIC[i.parts[2]]}{o.value(i.operands[3], 'pred')}"
    if "|" in i.operands[0]:
        raise _unknown(i)
    return o.store(i.operands[0], "pred", found)


def _convert(o: Operands, i: Instruction) -> str:
    into, kind = i.parts[-2:]
    if "sat" in i.parts or "relu" in i.parts:
        raise _unknown(i)
    if into in ("f16x2", "bf16x2"):
        half = f"from_{into.removesuffix('x2')}"
        high, low = (o.value(one, kind) for one in i.operands[1:])
        return o.store(i.operands[0], "b32", f"((u32){half}({high})<<16)|{half}({low})")
    x = o.value(i.operands[1], kind)
    if into in FLOATS:
        return o.store(i.operands[0], into, f"({'f64' if into == 'f64' else 'f32'}){x}")
    if kind in FLOATS:
        rounded = next((one for part, one in _ROUNDED.items() if part in i.parts), None)
        if rounded is None:
            raise _unknown(i)
        return o.store(i.operands[0], into, f"to_integer<{c_type(into)}>(std::{rounded}({x}))")
    return o.store(i.operands[0], into, f"({c_type(into)}){x}")


def _function(o: Operands, i: Instruction) -> str:
    if i.kind != "f32":
        raise _unknown(i)
    return o.store(i.operands[0], "f32", _FUNCTIONS[i.name].format(o.value(i.operands[1], "f32")))


def _to_generic(o: Operands, i: Instruction) -> str:
    return o.store(i.operands[0], "b64", o.value(i.operands[1], "b64"))


def _active(o: Operands, i: Instruction) -> str:
    return o.store(i.operands[0], "b32", "m")


SCALAR: Mapping[str, Callable[[Operands, Instruction], str]] = {
    "mov": _move,
    **dict.fromkeys(_SIGNS, _add),
    "mad": _mad,
    "fma": _fma,
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("div", "rem"), _divide),
    **dict.fromkeys(_LOGIC, _logic),
    **dict.fromkeys(("neg", "abs", "not", "popc", "clz"), _one),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("lop3", "prmt", "bfe", "bfi"), _words),
    "shf": _funnel,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
    **dict.fromkeys(_FUNCTIONS, _function),
    "cvta": _to_generic,
    "activemask": _active,
}
