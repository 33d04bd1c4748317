"""Chooses the instructions of the native code: all that the processor has, or the smaller set in $MYCLI_CPU_ISA.

A smaller set reproduces on one machine the results of another.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mycli.runtime.device.system import Cpu
from mycli.runtime.errors import UsageError

VARIABLE = "MYCLI_CPU_ISA"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
# Linux's name of an instruction set -> the compiler's name after -m and -mno-, if they differ.
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
# What a wheel's libraries for AMD's processors have in addition to avx512vnni, best first. AVX-VNNI is what Zen 5 adds.
_AMD = {"avx512vnni-bf16-avxvnni": ("avx512_bf16", "avx_vnni"), "avx512vnni-bf16": ("avx512_bf16",)}


@dataclass(frozen=True)
class InstructionSet:
    """The processor flags that a set needs, and those it excludes although the processor may have them."""

    needs: tuple[str, ...]
    excludes: tuple[str, ...] = ()

    def on(self, flags: Collection[str]) -> bool:
        """Return whether a processor with these flags supports the set."""
        return set(self.needs) <= set(flags)

    def compiler_flags(self, flags: Collection[str]) -> tuple[str, ...]:
        """Return the options to add to -march=native."""
        # No option for what the processor lacks: an old compiler may not know the name.
        return tuple(f"-mno-{_COMPILERS.get(flag, flag)}" for flag in self.excludes if flag in flags)


# x86-64, best first. VNNI without AVX-512 (avx_vnni) is a different, later instruction.
SETS: Mapping[str, InstructionSet] = {
    "amx": InstructionSet((*_AMX, *_AVX512, "avx512_vnni", "avx512_bf16")),
    "avx512vnni": InstructionSet((*_AVX512, "avx512_vnni"), _AMX),
    "avx512": InstructionSet(_AVX512, (*_AMX, "avx512_vnni", "avx_vnni")),
    "avxvnni": InstructionSet((*_AVX2, "avx_vnni"), (*_AMX, "avx512f")),
    "avx2": InstructionSet(_AVX2, (*_AMX, "avx512f", "avx_vnni")),
}
ARM_SETS: Mapping[str, InstructionSet] = {"dotprod": InstructionSet(("asimddp",))}  # nothing to exclude
_ALL = {**SETS, **ARM_SETS}


def best_set(flags: Collection[str]) -> str:
    """Return the name of the best set that a processor supports, or "plain"."""
    return next((name for name, instructions in _ALL.items() if instructions.on(flags)), "plain")


def requested_set(flags: Collection[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the set in $MYCLI_CPU_ISA, or None. Raises UsageError if the processor does not support it."""
    name = environment.get(VARIABLE, "")
    if not name:
        return None
    supported = [known for known, instructions in _ALL.items() if instructions.on(flags)]
    if name not in supported:
        problem = "this processor does not support it" if name in _ALL else "unknown instruction set"
        raise UsageError(f"{VARIABLE}={name}: {problem}", f"choose one of: {', '.join(supported) or 'none'}")
    return name


def dots_are_fast(processor: Cpu) -> bool:
    """Return whether bf16 dot products are worth using: AMD runs them at the rate of integers, Intel at a fourth."""
    return "AMD" in processor.model and "avx512_bf16" in processor.flags


def compiler_flags(name: str | None, processor: Cpu) -> tuple[str, ...]:
    """Return the options to add to -march=native for the set `name` on `processor`; None: all it supports."""
    excluded = _ALL[name].compiler_flags(processor.flags) if name else ()
    return (*excluded, BF16_DOTS) if dots_are_fast(processor) and "-mno-avx512f" not in excluded else excluded


def portable_flags() -> dict[str, tuple[str, ...]]:
    """Return, for every library of a wheel, the options that allow exactly its instruction set."""
    amd = {name: (*SETS["avx512vnni"].needs, *more) for name, more in _AMD.items()}
    names = {name: instructions.needs for name, instructions in SETS.items()} | amd
    flags = {name: tuple(f"-m{_COMPILERS.get(flag, flag)}" for flag in needs) for name, needs in names.items()}
    return flags | {name: (*flags[name], BF16_DOTS) for name in amd}


def portable_name(name: str | None, processor: Cpu) -> str:
    """Return the key of `portable_flags` for the set `name` on `processor`, None for its best; else "plain"."""
    chosen = name or best_set(processor.flags)
    if chosen != "avx512vnni" or not dots_are_fast(processor):
        return chosen
    return next(name for name, more in _AMD.items() if set(more) <= set(processor.flags))
