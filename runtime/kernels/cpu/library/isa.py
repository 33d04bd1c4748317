"""Which instructions the native code may use: all that the processor has, or fewer, as MYCLI_CPU_ISA asks.

A smaller set shows on one machine what others do. Knows the names that Linux and the compiler have for instructions;
not what is compiled with them.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mycli.runtime.device.system import Cpu
from mycli.runtime.errors import UsageError

VARIABLE = "MYCLI_CPU_ISA"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
# What the kernel of Linux calls an instruction, and the compiler behind -m and -mno-, where that is not the same.
_COMPILERS = {
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx_vnni": "avxvnni",
}
_AMX = ("amx_tile", "amx_int8", "amx_bf16")
BF16_DOTS = "-DBF16_DOT=1"
_DOTS = "avx512vnni-bf16"  # of a wheel: the set beside it with dot products of bf16


@dataclass(frozen=True)
class InstructionSet:
    """What of a processor's `flags` it needs, and which of them it leaves out."""

    needs: tuple[str, ...]
    leaves: tuple[str, ...] = ()

    def on(self, flags: Collection[str]) -> bool:
        """Whether a processor of these flags has it."""
        return set(self.needs) <= set(flags)

    def compiler_flags(self, flags: Collection[str]) -> tuple[str, ...]:
        """Beside -march=native; none for what the processor has not: an old compiler may not know the name."""
        return tuple(f"-mno-{_COMPILERS.get(one, one)}" for one in self.leaves if one in flags)


# Of x86-64, best first. VNNI without AVX-512 is another instruction, which came later.
SETS: Mapping[str, InstructionSet] = {
    "amx": InstructionSet((*_AMX, *_AVX512, "avx512_vnni", "avx512_bf16")),
    "avx512vnni": InstructionSet((*_AVX512, "avx512_vnni"), _AMX),
    "avx512": InstructionSet(_AVX512, (*_AMX, "avx512_vnni", "avx_vnni")),
    "avxvnni": InstructionSet((*_AVX2, "avx_vnni"), (*_AMX, "avx512f")),
    "avx2": InstructionSet(_AVX2, (*_AMX, "avx512f", "avx_vnni")),
}
ARM_SETS: Mapping[str, InstructionSet] = {"dotprod": InstructionSet(("asimddp",))}  # there is nothing to leave out
_ALL = {**SETS, **ARM_SETS}


def best_set(flags: Collection[str]) -> str:
    """The name of the best set of a processor; "plain" where it has none."""
    return next((name for name, one in _ALL.items() if one.on(flags)), "plain")


def asked(flags: Collection[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """The name in $MYCLI_CPU_ISA; None where nothing is asked for.

    Raises UsageError where there is no such set or the processor of `flags` does not have it.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return None
    here = [one for one in _ALL if _ALL[one].on(flags)]
    if name not in here:
        kind = "this processor does not have it" if name in _ALL else "not an instruction set"
        raise UsageError(f"{VARIABLE}={name}: {kind}", f"here: {', '.join(here) or 'none'}")
    return name


def dots_are_fast(processor: Cpu) -> bool:
    """Whether dot products of bf16 are worth it: on AMD's. On Intel's they are a fourth of integers' rate, and
    converting is faster."""
    return "AMD" in processor.model and "avx512_bf16" in processor.flags


def compiler_flags(name: str | None, processor: Cpu) -> tuple[str, ...]:
    """Beside -march=native, for the set `name` on `processor`; None: everything it has."""
    left = _ALL[name].compiler_flags(processor.flags) if name else ()
    return (*left, BF16_DOTS) if dots_are_fast(processor) and "-mno-avx512f" not in left else left


def portable_flags() -> dict[str, tuple[str, ...]]:
    """For every library that a wheel carries, by name, what lets the compiler use that set of instructions alone."""
    names = {name: one.needs for name, one in SETS.items()} | {_DOTS: (*SETS["avx512vnni"].needs, "avx512_bf16")}
    flags = {name: tuple(f"-m{_COMPILERS.get(one, one)}" for one in needs) for name, needs in names.items()}
    return flags | {_DOTS: (*flags[_DOTS], BF16_DOTS)}


def portable_name(name: str | None, processor: Cpu) -> str:
    """Which of `portable_flags` is for the set `name` on `processor`, None for its best; "plain" is none of them."""
    chosen = name or best_set(processor.flags)
    return _DOTS if chosen == "avx512vnni" and dots_are_fast(processor) else chosen
