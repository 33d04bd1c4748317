"""Translate a PTX module to a C++ program: a C++ function per PTX function, a case per block.

The lanes of a warp run the lowest block that any of them is at, until all have returned: lanes that diverged reconverge
where their paths meet, as on a GPU. `scalar`, `memory` and `warp` translate the instructions.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ptx.emulator.memory import MEMORY, vector
from tests.ptx.emulator.operands import BYTES, UNSIGNED, Operands, Register, UnknownInstruction
from tests.ptx.emulator.parse import Function, Instruction, functions, instruction, operands, shared_symbols
from tests.ptx.emulator.scalar import SCALAR
from tests.ptx.emulator.warp import WARP

HERE = Path(__file__).parent
_MOST_PARAMETER_BYTES = 64
_WAITS = ("commit_group", "wait_group", "wait_all")


@dataclass(frozen=True)
class Access:
    """The instruction that accesses memory. size: bytes per lane; main_loop: in the smallest loop with a product."""

    text: str
    size: int
    main_loop: bool

    @property
    def writes(self) -> bool:
        """Return whether it writes global memory; a copy to shared memory reads it."""
        return self.text.split()[1 if self.text.startswith("@") else 0].startswith("st")


def main_loop(function: Function) -> range:
    """Return the blocks of the smallest loop with a matrix product; empty without one."""
    loops = []
    for end, block in enumerate(function.blocks):
        for statement in block:
            one = None if statement in "{}" or statement.startswith(".") else instruction(statement)
            if one is not None and one.name == "bra" and function.labels[one.operands[0]] <= end:
                loops.append(range(function.labels[one.operands[0]], end + 1))
    with_products = [
        loop
        for loop in loops
        if any(re.search(r"\bw?g?mma[._]", text) for block in loop for text in function.blocks[block])
    ]
    return min(with_products, key=len, default=range(0))


def _yields(one: Instruction) -> bool:
    """Return whether other programs may run before it: atomics, and loads that may wait for another program."""
    waits = one.name == "ld" and not {"volatile", "acquire", "relaxed"}.isdisjoint(one.parts)
    return waits or one.name in ("atom", "red")


def _kind(one: Instruction) -> str:
    """Return how an access counts in the race detector: its kind, whether it acquires, whether it releases."""
    order = {"acq_rel", "acquire", "release"} & set(one.parts)
    atomic = bool(order) or one.name in ("atom", "red") or "relaxed" in one.parts
    kind = "ATOMIC" if atomic else "WRITE" if one.name == "st" else "READ"
    acquires, releases = (int(bool(order & {"acq_rel", word})) for word in ("acquire", "release"))
    return f"KIND_OF({kind},{acquires},{releases})"


def _c_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


class _Translation:
    """The translation of one function."""

    def __init__(self, function: Function, shared: list[str], accesses: list[Access]) -> None:
        self._function, self._accesses = function, accesses
        self._main_loop, self._block = main_loop(function), 0
        self._declared: list[str] = []  # local memory
        self._parameters: dict[str, None] = {}  # of calls, by name
        self._code: list[str] = []
        self._run: list[str] = []  # statements on registers of one lane, for one loop over the lanes
        self._registers: dict[int, int] = {}  # number of registers, by size
        names = function.parameters
        places = [f"PARAMETERS[{i}]" if function.entry else f"&{_c_name(name)}_[l]" for i, name in enumerate(names)]
        given = dict(zip(names, places, strict=True))
        self._operands = Operands(dict.fromkeys(shared, "0"), given)

    @property
    def head(self) -> str:
        """Return its signature: the active lanes, and the locations of the parameters and the result of each lane."""
        names = [*self._function.parameters, *filter(None, [self._function.result])]
        given = [] if self._function.entry else [f"u8(*{_c_name(name)}_)[{_MOST_PARAMETER_BYTES}]" for name in names]
        return f"static void F_{_c_name(self._function.name)}({','.join(['u32 LANES', *given])})"

    def text(self) -> str:
        """Return its definition."""
        cases = []
        for index, block in enumerate(self._function.blocks):
            self._code, self._block = [], index
            ended = [self._statement(statement, index + 1) for statement in block]
            if not any(ended):
                self._run.append(f"at[l]={index + 1};")
            self._end_run()
            cases.append(f"case {index}:{{\n" + "\n".join(self._code) + "\n}break;")
        return (
            f"{self.head}{{\n"
            + "\n".join(self._declarations())
            + "\nint at[32];for(int l=0;l<32;l++)at[l]=LANES>>l&1?0:-1;\n"
            + "for(;;){int now=1<<30;for(int l=0;l<32;l++)if(at[l]>=0&&at[l]<now)now=at[l];if(now==1<<30)break;\n"
            + "u32 m=0;for(int l=0;l<32;l++)if(at[l]==now)m|=1u<<l;\nswitch(now){\n"
            + "\n".join(cases)
            + '\ndefault:fail("a path that leads nowhere");}}}\n'
        )

    def _declarations(self) -> Iterator[str]:
        yield from self._declared
        for name in self._parameters:
            yield f"u8 {name}_[32][{_MOST_PARAMETER_BYTES}];"
        for size, count in self._registers.items():
            word = UNSIGNED[size]
            yield f"std::vector<{word}> R{size}s({count}*32);auto R{size}=({word}(*)[32])R{size}s.data();"

    def _statement(self, text: str, following: int) -> bool:
        """Translate a statement; return whether the block ends with it. `following`: the next block."""
        if text == "{":
            self._operands.scopes.append({})
        elif text == "}":
            self._operands.scopes.pop()
        elif text.startswith("."):
            self._declare(text)
        else:
            one = instruction(text)
            if one.name in ("bra", "ret"):
                self._branch(one, following)
                return True
            if one.name == "call":
                self._warp(self._call(one))
            else:
                self._one(one)
        return False

    def _end_run(self) -> None:
        """Emit one loop for the pending statements: a loop for each instruction doubled compile time."""
        if self._run:
            self._code.append("ALL{" + "\n".join(self._run) + "}")
            self._run = []

    def _warp(self, text: str) -> None:
        """Emit an operation of the whole warp, or of its lanes one after the other in memory, which they share."""
        self._end_run()
        self._code.append(text)

    def _branch(self, one: Instruction, following: int) -> None:
        target = -1 if one.name == "ret" else self._function.labels[one.operands[0]]
        where = str(target)
        if one.guard is not None:
            where = f"{self._operands.value(one.guard, 'pred')}?{target}:{following}"
        self._run.append(f"at[l]={where};")

    def _declare(self, text: str) -> None:
        if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.DOTALL):
            for name in operands(match[2]):
                self._register(name, BYTES[match[1]])
        elif match := re.match(r"\.param\s+.*?([%\w]+)(?:\[(\d+)\])?$", text, re.DOTALL):
            if int(match[2] or 8) > _MOST_PARAMETER_BYTES:
                raise UnknownInstruction(text)
            self._parameters[_c_name(match[1])] = None
        elif match := re.match(r"\.local\s+.*\s(\w+)\[(\d+)\]", text):
            name = f"local_{_c_name(match[1])}"
            self._declared.append(f"std::vector<u8> {name}(32*{match[2]});")
            self._operands.symbols[match[1]] = f"({name}.data()+l*{match[2]})"
        elif not text.startswith(".pragma"):
            raise UnknownInstruction(text)

    def _register(self, name: str, size: int) -> None:
        """Declare one register, or "name<count>" of them; on the heap, since there are thousands."""
        match = re.fullmatch(r"(%?\w+)<(\d+)>", name)
        first, scope = self._registers.get(size, 0), self._operands.scopes[-1]
        count = int(match[2]) if match else 1
        for place in range(count):
            scope[f"{match[1]}{place}" if match else name] = Register(f"R{size}[{first + place}]", size)
        self._registers[size] = first + count

    def _call(self, one: Instruction) -> str:
        """Translate call.uni (result), function, (arguments): the addresses of both are passed."""
        given = list(one.operands)
        result = [given.pop(0).strip("() \n\t")] if given[0].startswith("(") else []
        arguments = operands(given[1].strip()[1:-1]) if len(given) > 1 else []
        places = "".join(f",{_c_name(name)}_" for name in (*arguments, *result))
        return f"F_{_c_name(given[0])}(m{places});"

    def _counted(self, one: Instruction, text: str) -> str:
        """Return the statement of every lane, with a count of the memory that they touch together."""
        size = int(one.operands[2], 0) if one.name == "cp" else BYTES.get(one.kind, 4) * vector(one)
        self._accesses.append(Access(one.text, size, self._block in self._main_loop))
        whole = f"FORGET {_kind(one)} ALL {text} SETTLE({len(self._accesses) - 1},{size}) SAME_AGAIN"
        return whole if one.name in ("ld", "cp") else f"WRITES++; {whole}"

    def _counted_matrices(self, one: Instruction) -> str:
        """Return the count of ldmatrix or stmatrix after it: eight rows of 16 bytes are served together."""
        if one.name not in ("ldmatrix", "stmatrix"):
            return ""
        self._accesses.append(Access(one.text, 16, self._block in self._main_loop))
        rows = 8 * int(next(part[1:] for part in one.parts if re.fullmatch(r"x[124]", part)))
        return f" FORGET for(int r=0;r<{rows};r++){{NOTE(0,rows[r])}} SETTLE({len(self._accesses) - 1},16)"

    def _one(self, one: Instruction) -> None:
        """Translate an instruction, for the lanes that its guard enables."""
        waits = one.parts[:2] == ("cp", "async") and one.parts[2] in _WAITS
        of_warp = WARP.get("cp.async" if waits else one.name)
        of_lane = None if of_warp is not None else SCALAR.get(one.name) or MEMORY.get(one.name)
        handler = of_warp or of_lane
        if handler is None:
            raise UnknownInstruction(one.text)
        try:
            body = handler(self._operands, one)
        except (KeyError, ValueError, IndexError, StopIteration) as error:
            raise UnknownInstruction(one.text) from error
        guard = None if one.guard is None else self._operands.value(one.guard, "pred")
        if of_lane is not None:
            text = f"{{{body}}}" if guard is None else f"if({guard}){{{body}}}"
            if one.name in SCALAR:
                self._run.append(text)
            else:
                whole = f"ALL {text}" if one.parts[:3] == ("cp", "async", "bulk") else self._counted(one, text)
                self._warp(("give_turn(READY);" if _yields(one) else "") + f"AT({json.dumps(one.text)}) {whole}")
        elif guard is None:
            self._warp(f"{{{body}{self._counted_matrices(one)}}}")
        else:
            self._warp(f"{{u32 left=0;ALL left|=(u32)!!({guard})<<l;if(left){{u32 m=left;{body}}}}}")


def translate(ptx: str) -> str:
    """Return the C++ of a module with one kernel. Raises UnknownInstruction, which names the instruction."""
    return translate_counting(ptx)[0]


def translate_counting(ptx: str) -> tuple[str, list[Access]]:
    """Return the C++ of `translate`, and the instructions whose accesses it counts."""
    shared, accesses = shared_symbols(ptx), list[Access]()
    translated = [(_Translation(function, shared, accesses), function) for function in functions(ptx)]
    kernel = next(function for _, function in translated if function.entry)
    texts = [one.text() for one, _ in translated]
    heads = [f"{one.head};" for one, _ in translated]
    define = f"#define KERNEL() F_{_c_name(kernel.name)}(0xffffffffu)"
    count = f"#define STATEMENTS {max(1, len(accesses))}"
    return "\n".join([count, '#include "machine.h"', *heads, *texts, define, '#include "scheduler.h"', ""]), accesses
