"""Check that a dependent launch accesses no memory before the previous launch has ended, in PTX and SASS."""

import re
from itertools import product

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  (reason: only where Triton is installed)

from tests.ptx import (
    builds,  # noqa: E402  (reason: as above)
    report,  # noqa: E402  (reason: as above)
)
from tests.support.grids import chosen  # noqa: E402  (reason: as above)

MEMORY = r"\b(ld\.global|st\.global|atom\.|red\.|cp\.async(?!\.bulk\.prefetch))"
ACCESS = r"\b(LDG|LDGSTS|STG|ATOMG?|RED|LD|ST|UTMALDG)\."
KERNELS = ["embed", "rows 8 add 1", "rows 8 SiLU 8", "rows 8 rotate int8 8", "attend to 1", "attend int8 to 8"]
EXPERTS = [
    "score experts",
    "choose experts by sigmoid",
    "place pairs",
    "SiLU of experts",
    "add experts",
    "behind a norm",
]


def build(name: str, capability: int) -> builds.Build:
    return next(build for build in builds.builds(capability) if build.name.endswith(name))


def places(pattern: str, text: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, text)]


# Every way of waiting once, and every chip; `test_fused` checks that each kernel waits.
QUICK = [(name, 90) for name in (*KERNELS[:4], "place pairs", "add experts")]
QUICK += [("attend to 1", 100), ("attend int8 to 8", 120)]


# What is loaded before the wait: attention's length and block. Prefetches: weights, keys and values.
LOADED = {"attend to 1": 2, "attend int8 to 8": 2}
FETCHED = {**dict.fromkeys(KERNELS[1:4], 1), **dict.fromkeys(KERNELS[4:], 2)}
NEXT_FIRST = ("rows 8 add 1", "rows 8 SiLU 8")  # not before attention, which loads before its own wait


@pytest.mark.parametrize(("name", "capability"), chosen(product(KERNELS + EXPERTS, (90, 100, 120)), QUICK))
def test_waits_before_it_touches_memory(name: str, capability: int) -> None:
    assembly = build(name, capability).compile(GPUTarget("cuda", capability, 32)).asm
    ptx = assembly["ptx"][assembly["ptx"].index(".entry") :]
    (wait,), (allow,) = places(r"griddepcontrol\.wait", ptx), places(r"griddepcontrol\.launch_dependents", ptx)
    assert (allow < wait) == (name in NEXT_FIRST)
    before = [place for place in places(MEMORY, ptx) if place < wait]
    assert len(before) == LOADED.get(name, 0) and all(ptx.startswith("ld.global", place) for place in before)
    fetched = places(r"cp\.async\.bulk\.prefetch\.L2\.global", ptx)
    assert [place < wait for place in fetched] == [True] * FETCHED.get(name, 0)

    sass = report._tool("nvdisasm", "-c", assembly["cubin"])
    (wait,) = places("ACQBULK", sass)
    assert sum(place < wait for place in places(ACCESS, sass)) == len(before), "the assembler has kept the order"
    assert all(place < wait for place in places("UBLKPF", sass))


def test_older_chips_do_not_have_it() -> None:
    for name in ("embed", "rows 8 add 1", "attend to 1"):  # one of each way of waiting
        assert "griddepcontrol" not in build(name, 89).compile(GPUTarget("cuda", 89, 32)).asm["ptx"]
