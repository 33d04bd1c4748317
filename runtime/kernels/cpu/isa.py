"""Which instructions the native code may use: all that the processor has, or fewer, as MYCLI_CPU_ISA asks.

A smaller set shows on one machine what others do. Knows the kernel's names of instructions and the compiler's; not what
is compiled with them.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mycli.runtime.device.system import Cpu
from mycli.runtime.errors import UsageError

VARIABLE = "MYCLI_CPU_ISA"
_AVX2, _AVX512 = ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl")
# What the kernel of Linux calls an instruction, and what keeps the compiler from it.
_WITHOUT = {
    "amx_tile": "-mno-amx-tile",
    "amx_int8": "-mno-amx-int8",
    "amx_bf16": "-mno-amx-bf16",
    "avx512_vnni": "-mno-avx512vnni",
    "avx_vnni": "-mno-avxvnni",
    "avx512f": "-mno-avx512f",
}
_AMX = ("amx_tile", "amx_int8", "amx_bf16")


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
        return tuple(_WITHOUT[one] for one in self.leaves if one in flags)


# Best first. VNNI without AVX-512 is another instruction, which came later.
SETS: Mapping[str, InstructionSet] = {
    "amx": InstructionSet((*_AMX, *_AVX512, "avx512_vnni")),
    "avx512vnni": InstructionSet((*_AVX512, "avx512_vnni"), _AMX),
    "avx512": InstructionSet(_AVX512, (*_AMX, "avx512_vnni", "avx_vnni")),
    "avxvnni": InstructionSet((*_AVX2, "avx_vnni"), (*_AMX, "avx512f")),
    "avx2": InstructionSet(_AVX2, (*_AMX, "avx512f", "avx_vnni")),
}


def best_set(flags: Collection[str]) -> str:
    """The name of the best set of a processor; "plain" where it has none."""
    return next((name for name, one in SETS.items() if one.on(flags)), "plain")


def asked(flags: Collection[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """The name in $MYCLI_CPU_ISA; None where nothing is asked for.

    Raises UsageError where there is no such set or the processor of `flags` does not have it.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return None
    here = [one for one in SETS if SETS[one].on(flags)]
    if name not in here:
        kind = "this processor does not have it" if name in SETS else "not an instruction set"
        raise UsageError(f"{VARIABLE}={name}: {kind}", f"here: {', '.join(here) or 'none'}")
    return name


def compiler_flags(name: str | None, processor: Cpu) -> tuple[str, ...]:
    """For the set `name` on `processor`; None: everything it has."""
    left = SETS[name].compiler_flags(processor.flags) if name else ()
    # Dot products of bf16 are a fourth of integers' rate on Intel's processors, and converting is faster; not on AMD's.
    fast = "AMD" in processor.model and "avx512_bf16" in processor.flags and _WITHOUT["avx512f"] not in left
    return (*left, "-DBF16_DOT=1") if fast else left
