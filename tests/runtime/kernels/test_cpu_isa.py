"""Test which instruction set is used: all that the processor supports, or the requested one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.quant.recipe import Recipe
from mycli.runtime.device.system import Cpu, cpu
from mycli.runtime.errors import Declined, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.kernels.cpu.library import build, isa
from mycli.runtime.kernels.cpu.library.build import Native, native
from tests.benchmarks.untied_head import untie
from tests.support.paths import ROOT
from tests.support.quantizing import make

HASWELL = frozenset(("avx2", "fma", "f16c"))
ALDER_LAKE = HASWELL | {"avx_vnni"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl"}
ZEN_4 = SKYLAKE | {"avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN_4 | {"avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
BEST = {
    "plain": frozenset(("sse2",)),
    "avx2": HASWELL,
    "avxvnni": ALDER_LAKE,
    "avx512": SKYLAKE,
    "avx512vnni": ZEN_4,
    "amx": SAPPHIRE_RAPIDS,
    "dotprod": frozenset(("asimd", "asimddp")),
}


@pytest.mark.parametrize("name", BEST)
def test_best(name: str) -> None:
    assert isa.best_set(BEST[name]) == name
    assert isa.requested_set(BEST[name], {}) is None
    assert isa.compiler_flags(None, Cpu("Some processor", 1, BEST[name])) == ()


@pytest.mark.parametrize("name", isa.SETS)
def test_a_set_leaves_out_what_it_has_not(name: str) -> None:
    """The compiler, if old, need not know the name of an instruction set that the machine lacks."""
    flags = isa.compiler_flags(name, Cpu("Some processor", 1, SAPPHIRE_RAPIDS))
    assert ("-mno-amx-tile" in flags) == (name != "amx")
    assert ("-mno-avx512f" in flags) == (name in ("avxvnni", "avx2"))
    assert ("-mno-avxvnni" in flags) == (name in ("avx512", "avx2"))
    assert isa.requested_set(SAPPHIRE_RAPIDS, {isa.VARIABLE: name}) == name
    assert isa.compiler_flags(name, Cpu("Some processor", 1, frozenset())) == ()


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(UsageError, match="MYCLI_CPU_ISA=amx: this processor does not support it") as error:
        isa.requested_set(ZEN_4, {isa.VARIABLE: "amx"})
    assert error.value.hint == "choose one of: avx512vnni, avx512, avx2"
    with pytest.raises(UsageError, match="MYCLI_CPU_ISA=sse9: unknown instruction set") as error:
        isa.requested_set(BEST["plain"], {isa.VARIABLE: "sse9"})
    assert error.value.hint == "choose one of: none"


def test_dot_products_of_bf16_are_for_processors_on_which_they_are_fast() -> None:
    amd = Cpu("AMD EPYC 9654", 1, ZEN_4)
    assert isa.compiler_flags(None, amd) == ("-DBF16_DOT=1",)
    assert "-DBF16_DOT=1" in isa.compiler_flags("avx512vnni", amd)
    assert "-DBF16_DOT=1" not in isa.compiler_flags("avx2", amd)
    assert isa.compiler_flags(None, Cpu("Intel(R) Xeon(R)", 1, ZEN_4)) == ()


def test_the_environment_chooses_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(build, "cpu", lambda: Cpu("Some processor", 1, SAPPHIRE_RAPIDS))
    monkeypatch.setattr(build, "compile_library", lambda _, extra=(): asked.append(tuple(extra)))
    monkeypatch.setattr(build, "load_library", lambda *_: "loaded")
    for name in ("", "avx2", "amx"):
        monkeypatch.setenv(isa.VARIABLE, name)
        native.__wrapped__()
    assert [len(flags) for flags in asked] == [0, 5, 0]
    monkeypatch.setenv(isa.VARIABLE, "avx9")
    with pytest.raises(UsageError):
        native.__wrapped__()
    with pytest.raises(UsageError):
        build.build_reason()


def test_the_library_says_what_it_uses(library: Native) -> None:
    assert library.isa in (*isa.SETS, "plain")


def test_this_machines_own_is_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    found = native()
    if isinstance(found, Declined):
        pytest.skip(f"no native code here: {found}")
    asked = isa.requested_set(cpu().flags)
    # The kernel may deny access to AMX registers, and a compiler may not know new instruction sets.
    assert found.isa == asked or list(isa.SETS).index(found.isa) >= list(isa.SETS).index(isa.best_set(cpu().flags))


@pytest.mark.slow
def test_a_packed_model_has_the_same_logits_with_every_set(tmp_path: Path) -> None:
    """Every product of the model is packed, and each cache is read. Sets that were never used are compiled first."""
    untie(tmp_path / "untied")
    source = Source("untied", tmp_path / "untied", None, None)
    make(source, tmp_path / "packed", Recipe(method="rtn", head="int8"), "quick")
    command = [sys.executable, "-m", "tests.benchmarks.logits_hash", str(tmp_path / "packed"), "--sequences", "2"]
    sets = [name for name, instructions in isa.SETS.items() if instructions.on(cpu().flags)]
    found = {}
    for name in sets:
        environment = {**os.environ, isa.VARIABLE: name, "PYTHONPATH": str(ROOT / ".links"), "OMP_NUM_THREADS": "1"}
        found[name] = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
    assert len(set(found.values())) == 1, found
