"""A module of PTX as the text of a C++ program: a function for each of its functions, a case for each block.

The lanes of a warp run the lowest block that any of them is at, until all have returned: lanes that branched apart meet
again where their paths do, as on a GPU with reconvergence. Knows how functions, scopes and branches are written; what
instructions do is in `scalar`, `memory` and `warp`.
"""

import re
from pathlib import Path

from tests.ptx.emulator.memory import MEMORY
from tests.ptx.emulator.operands import BYTES, UNSIGNED, Operands, Register, UnknownInstruction
from tests.ptx.emulator.parse import Function, Instruction, functions, instruction, operands, shared_symbols
from tests.ptx.emulator.scalar import SCALAR
from tests.ptx.emulator.warp import WARP

HERE = Path(__file__).parent
_MOST_PARAMETER_BYTES = 64
_WAITS = ("commit_group", "wait_group", "wait_all")


def _c_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


class _Translation:
    """One function on its way."""

    def __init__(self, function: Function, shared: list[str]) -> None:
        self._function = function
        self._declared: list[str] = []  # registers of the whole function
        self._code: list[str] = []
        self._count = 0
        names = function.parameters
        places = [f"PARAMETERS[{i}]" if function.entry else f"&{_c_name(name)}_[l]" for i, name in enumerate(names)]
        given = dict(zip(names, places, strict=True))
        self._operands = Operands(dict.fromkeys(shared, "0"), given)

    @property
    def head(self) -> str:
        """Its signature: the lanes that call, and where parameters and the result of each lie."""
        names = [*self._function.parameters, *filter(None, [self._function.result])]
        given = [] if self._function.entry else [f"u8(*{_c_name(name)}_)[{_MOST_PARAMETER_BYTES}]" for name in names]
        return f"static void F_{_c_name(self._function.name)}({','.join(['u32 LANES', *given])})"

    def text(self) -> str:
        """Its definition."""
        cases = []
        for index, block in enumerate(self._function.blocks):
            self._code = []
            ended = [self._statement(statement, index + 1) for statement in block]
            if not any(ended):
                self._code.append(f"ALL at[l]={index + 1};")
            cases.append(f"case {index}:{{\n" + "\n".join(self._code) + "\n}break;")
        return (
            f"{self.head}{{\n"
            + "\n".join(self._declared)
            + "\nint at[32];for(int l=0;l<32;l++)at[l]=LANES>>l&1?0:-1;\n"
            + "for(;;){int now=1<<30;for(int l=0;l<32;l++)if(at[l]>=0&&at[l]<now)now=at[l];if(now==1<<30)break;\n"
            + "u32 m=0;for(int l=0;l<32;l++)if(at[l]==now)m|=1u<<l;\nswitch(now){\n"
            + "\n".join(cases)
            + '\ndefault:fail("a path that leads nowhere");}}}\n'
        )

    def _statement(self, text: str, following: int) -> bool:
        """Whether the block ends with it; `following` is the block after."""
        if text == "{":
            self._operands.scopes.append({})
            self._code.append("{")
        elif text == "}":
            self._operands.scopes.pop()
            self._code.append("}")
        elif text.startswith("."):
            self._declare(text)
        else:
            one = instruction(text)
            if one.name in ("bra", "ret"):
                self._branch(one, following)
                return True
            self._code.append(self._call(one) if one.name == "call" else self._one(one))
        return False

    def _branch(self, one: Instruction, following: int) -> None:
        target = -1 if one.name == "ret" else self._function.labels[one.operands[0]]
        where = str(target)
        if one.guard is not None:
            where = f"{self._operands.value(one.guard, 'pred')}?{target}:{following}"
        self._code.append(f"ALL at[l]={where};")

    def _declare(self, text: str) -> None:
        if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.DOTALL):
            for name in operands(match[2]):
                self._register(name, BYTES[match[1]])
        elif match := re.match(r"\.param\s+.*?([%\w]+)(?:\[(\d+)\])?$", text, re.DOTALL):
            if int(match[2] or 8) > _MOST_PARAMETER_BYTES:
                raise UnknownInstruction(text)
            self._code.append(f"u8 {_c_name(match[1])}_[32][{_MOST_PARAMETER_BYTES}];")
        elif match := re.match(r"\.local\s+.*\s(\w+)\[(\d+)\]", text):
            name = f"local_{_c_name(match[1])}"
            self._declared.append(f"std::vector<u8> {name}(32*{match[2]});")
            self._operands.symbols[match[1]] = f"({name}.data()+l*{match[2]})"
        elif not text.startswith(".pragma"):
            raise UnknownInstruction(text)

    def _register(self, name: str, size: int) -> None:
        """One register, or "name<count>" of them; outside braces on the heap, since there are thousands."""
        self._count += 1
        match = re.fullmatch(r"(%?\w+)<(\d+)>", name)
        count, c_name, word = int(match[2]) if match else 1, f"R{self._count}_{_c_name(name)}", UNSIGNED[size]
        if len(self._operands.scopes) > 1:
            self._code.append(f"{word} {c_name}[{count}][32];")
        else:
            self._declared.append(
                f"std::vector<{word}> {c_name}s({count}*32);auto {c_name}=({word}(*)[32]){c_name}s.data();"
            )
        scope = self._operands.scopes[-1]
        for place in range(count):
            scope[f"{match[1]}{place}" if match else name] = Register(f"{c_name}[{place}]", size)

    def _call(self, one: Instruction) -> str:
        """call.uni (result), function, (arguments): addresses of both are handed over."""
        given = list(one.operands)
        result = [given.pop(0).strip("() \n\t")] if given[0].startswith("(") else []
        arguments = operands(given[1].strip()[1:-1]) if len(given) > 1 else []
        places = "".join(f",{_c_name(name)}_" for name in (*arguments, *result))
        return f"F_{_c_name(given[0])}(m{places});"

    def _one(self, one: Instruction) -> str:
        """An instruction, for the lanes that its guard leaves."""
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
            turn = "give_turn(READY);" if one.name in ("atom", "red") else ""
            return f"{turn}ALL{{{body}}}" if guard is None else f"{turn}ALL if({guard}){{{body}}}"
        if guard is None:
            return f"{{{body}}}"
        return f"{{u32 left=0;ALL left|=(u32)!!({guard})<<l;if(left){{u32 m=left;{body}}}}}"


def translate(ptx: str) -> str:
    """The C++ of a module with one kernel. Raises UnknownInstruction, which says what is not known."""
    shared = shared_symbols(ptx)
    translated = [(_Translation(function, shared), function) for function in functions(ptx)]
    kernel = next(function for _, function in translated if function.entry)
    texts = [one.text() for one, _ in translated]
    heads = [f"{one.head};" for one, _ in translated]
    define = f"#define KERNEL() F_{_c_name(kernel.name)}(0xffffffffu)"
    return "\n".join(['#include "machine.h"', *heads, *texts, define, '#include "scheduler.h"', ""])
