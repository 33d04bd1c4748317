"""Translate instructions of a whole warp: barriers, shuffles, votes, matrix products (PTX ISA, 9.7.9 to 9.7.15).

Each function returns the C++ statement of a warp, in which `m` is the mask of the lanes that execute it.
"""

import re
from collections.abc import Callable, Mapping

from tests.ptx.emulator.operands import Operands, UnknownInstruction, address, braced, c_type
from tests.ptx.emulator.parse import Instruction

_WIDEN = {"f16": "as_f16", "bf16": "as_bf16"}
_SOURCE = {"bfly": "l^{}", "idx": "({})&31", "down": "l+{}", "up": "l-{}"}
_REDUCED = {
    "min": ("std::numeric_limits<T>::max()", "std::min(all,{})"),
    "max": ("std::numeric_limits<T>::min()", "std::max(all,{})"),
    "add": ("0", "all+{}"),
    "or": ("0", "all|{}"),
    "and": ("~(T)0", "all&{}"),
    "xor": ("0", "all^{}"),
}


def _nothing(o: Operands, i: Instruction) -> str:
    """Translate memory fences and launch overlap to nothing: memory is in order and launches are sequential here."""
    return ""


def _barrier(o: Operands, i: Instruction) -> str:
    if "warp" in i.parts:
        return ""
    return 'if(m!=LANES)fail("a barrier that not all lanes reach");give_turn(AT_BARRIER);'


def _copies(o: Operands, i: Instruction) -> str:
    """Translate cp.async.commit_group, .wait_group N and .wait_all."""
    if i.parts[2] == "commit_group":
        return "ALL commit(l);"
    if i.parts[2] == "wait_group":
        return f"ALL wait_copies(l,{i.operands[0]});"
    return "ALL{commit(l);wait_copies(l,0);}"


def _shuffle(o: Operands, i: Instruction) -> str:
    target, value, by, _clamp, _members = i.operands
    source = _SOURCE[i.parts[2]].format(o.value(by, "u32"))
    if "|" in target or i.parts[-1] != "b32":
        raise UnknownInstruction(i.text)
    take = f'int from={source};if(from<0||from>31)from=l;if(!(m>>from&1))fail("a shuffle from a lane that is away");'
    given = f"u32 given[32];for(int l=0;l<32;l++)given[l]={o.value(value, 'u32')};"
    return f"{given}ALL{{{take}{o.store(target, 'b32', 'given[from]')}}}"


def _reduce(o: Operands, i: Instruction) -> str:
    first, step = _REDUCED[i.parts[2]]
    collect = step.format(o.value(i.operands[1], i.kind))
    return f"typedef {c_type(i.kind)} T;T all={first};ALL all={collect};ALL{{{o.store(i.operands[0], i.kind, 'all')}}}"


def _vote(o: Operands, i: Instruction) -> str:
    said = o.value(i.operands[1], "pred")
    if i.parts[2] == "ballot":
        return f"u32 votes=0;ALL votes|=(u32)(!!{said})<<l;ALL{{{o.store(i.operands[0], 'b32', 'votes')}}}"
    if i.parts[2] not in ("any", "all"):
        raise UnknownInstruction(i.text)
    found = f"bool any=false,all=true;ALL{{any|={said};all&={said};}}"
    return f"{found}ALL{{{o.store(i.operands[0], 'pred', i.parts[2])}}}"


def _elect(o: Operands, i: Instruction) -> str:
    return f"int first=__builtin_ctz(m);ALL{{{o.store(i.operands[0].split('|')[1], 'pred', 'l==first')}}}"


def _fragment(o: Operands, name: str, operand: str) -> tuple[str, int]:
    """Return an array of the registers of a fragment, and their number."""
    registers = [o.lanes(one) for one in braced(operand)]
    return f"u32*{name}[]={{{','.join(registers)}}};", len(registers)


def _mma(o: Operands, i: Instruction) -> str:
    shape = next((re.fullmatch(r"m16n8k(\d+)", part) for part in i.parts if part.startswith("m16")), None)
    if shape is None or i.parts[-3] not in _WIDEN or i.parts[-1] != "f32":
        raise UnknownInstruction(i.text)
    (d, _), (a, left), (b, right), (c, _) = (
        _fragment(o, name, one) for name, one in zip("dabc", i.operands, strict=True)
    )
    widen = _WIDEN[i.parts[-3]]
    return f'whole_warp(m,"a divergent mma");{a}{b}{c}{d}mma(a,{left},b,{right},c,d,{widen},{shape[1]});'


def _wgmma(o: Operands, i: Instruction) -> str:
    """Translate wgmma: it completes when issued; fence, commit and wait do nothing."""
    if i.parts[1] != "mma_async":
        return ""
    shape = next((re.fullmatch(r"m64n(\d+)k16", part) for part in i.parts if part.startswith("m64")), None)
    if shape is None or i.parts[-1] not in _WIDEN or "f32" not in i.parts:
        raise UnknownInstruction(i.text)
    d, _ = _fragment(o, "d", i.operands[0])
    left, right, keep, *_scales, transposed = i.operands[1:]
    if left.startswith("{"):
        a, at, turned = _fragment(o, "a", left)[0], "0", "0"
    else:
        a, at, turned = "u32**a=nullptr;", f"{o.lanes(left)}[0]", _scales[-1]
    added = f"{o.lanes(keep)}[0]" if o.register(keep) else keep
    call = f"wgmma(d,{shape[1]},a,{at},{turned},{o.lanes(right)}[0],{transposed},{added},{_WIDEN[i.parts[-1]]});"
    return f'whole_warp(m,"a divergent wgmma");KIND_OF(READ,0,0){d}{a}{call}'


def _matrices(o: Operands, i: Instruction) -> str:
    """Translate ldmatrix and stmatrix of one, two or four 8 x 8 matrices of 16 bits."""
    load = i.name == "ldmatrix"
    memory, registers = i.operands if not load else i.operands[::-1]
    if "m8n8" not in i.parts or i.parts[-1] != "b16":
        raise UnknownInstruction(i.text)
    base, offset = address(memory)
    fragment, count = _fragment(o, "words", registers)
    rows = f"u32 rows[32];for(int l=0;l<32;l++)rows[l]={o.value(base, 'u32')}+({offset});"
    moved = f"move_matrices(words,{count},rows,{int('trans' in i.parts)},{int(load)});"
    kind = f"KIND_OF({'READ' if load else 'WRITE'},0,0)"
    return f'whole_warp(m,"a divergent {i.name}");{kind}{rows}{fragment}{moved}SAME_AGAIN'


WARP: Mapping[str, Callable[[Operands, Instruction], str]] = {
    **dict.fromkeys(("membar", "fence", "griddepcontrol", "pragma"), _nothing),
    **dict.fromkeys(("bar", "barrier"), _barrier),
    "cp.async": _copies,
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "elect": _elect,
    "mma": _mma,
    "wgmma": _wgmma,
    **dict.fromkeys(("ldmatrix", "stmatrix"), _matrices),
}
