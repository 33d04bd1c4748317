"""Check that the compiled code orders memory at arrival as the last program needs it.

The interpreter runs programs one after the other and so hides a missing barrier; here the PTX is checked. The results
are tested with each epilogue.
"""

import re
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  (reason: only where Triton is installed)

from tests.ptx import builds  # noqa: E402  (reason: as above)

ARRIVE = "atom.global.gpu.acq_rel.add.u32"


def wrong_order(ptx: str) -> str | None:
    """Return what is wrong around the arrival.

    bar.sync orders the threads of a program, acq_rel those that arrive: only in this order do all stores of all
    programs come before all loads of the last one (PTX ISA, memory consistency model: causality order).
    """
    kernel = ptx[ptx.index(".entry") :]
    lines = [
        line for line in kernel.splitlines() if re.search(r"\b(bar\.sync|atom\.|ld\.global|st\.global|call)", line)
    ]
    arrivals = [index for index, line in enumerate(lines) if "atom." in line]
    if len(arrivals) != 1 or ARRIVE not in lines[arrivals[0]]:
        return "the arrival"
    stored = max(index for index, line in enumerate(lines[: arrivals[0]]) if "st.global" in line)
    if not any("bar.sync" in line for line in lines[stored : arrivals[0]]):
        return "no barrier between the stores of a program and its arrival"
    read = next(i for i, line in enumerate(lines) if i > arrivals[0] and ("ld.global" in line or "call" in line))
    if not any("bar.sync" in line for line in lines[arrivals[0] : read]):
        return "no barrier between the arrival and what the last program reads"
    return None


def through_l1(ttir: str) -> list[str]:
    """Return the loads of fp32, the type of all exchanged partial sums, that may come from an L1 cache."""
    after = ttir[ttir.index("tt.atomic_rmw") :] + "".join(re.findall(r"tt\.func private.*?\n  }\n", ttir, re.DOTALL))
    loads = [line for line in after.splitlines() if "tt.load" in line and "!tt.ptr<f32>" in line]
    assert loads
    return [line for line in loads if "cacheModifier = cg" not in line]


def compiled(name: str, capability: int) -> dict[str, str]:
    one = next(build for build in builds.decode_builds(capability) if build.name.endswith(name))
    assembly: dict[str, str] = one.compile(GPUTarget("cuda", capability, 32)).asm
    return assembly


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["add 1", "SiLU 8", "rotate int8 8", "attend to 1", "attend int8 to 8"])
def test_the_last_program_reads_what_all_have_written(name: str, capability: int) -> None:
    assembly = compiled(name, capability)
    asked = re.search(r"ttg\.barrier all.*\n.*tt\.atomic_rmw add, acq_rel, gpu", assembly["ttir"])
    assert asked, "a barrier of the kernel's own, whatever this version of Triton adds"
    assert wrong_order(assembly["ptx"]) is None
    assert not through_l1(assembly["ttir"]) and "ld.global.cg" in assembly["ptx"]


def without_last(pattern: str, before: str) -> Callable[[str], str]:
    """Return a function that removes the last match of `pattern` before `before` from a text."""

    def spoil(text: str) -> str:
        head, mark, tail = text.partition(before)
        at = [match.span() for match in re.finditer(pattern, head)][-1]
        return head[: at[0]] + head[at[1] :] + mark + tail

    return spoil


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (without_last(r"bar\.sync", ARRIVE), "no barrier between the stores"),
        (lambda ptx: ptx.replace(".acq_rel", ".relaxed"), "the arrival"),
        (
            lambda ptx: re.sub(r"(acq_rel.*?)bar\.sync", r"\1", ptx, count=1, flags=re.DOTALL),
            "no barrier between the arr",
        ),
    ],
    ids=["barrier before", "relaxed", "barrier after"],
)
def test_notices(spoil: Callable[[str], str], found: str) -> None:
    assert found in (wrong_order(spoil(compiled("add 1", 90)["ptx"])) or "")
