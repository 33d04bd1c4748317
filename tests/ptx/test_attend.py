"""The compiled shared memory of attention equals what its launcher computes: the most stages that fit."""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  (reason: only where Triton is installed)

from mycli.runtime.kernels.triton.attention import (  # noqa: E402  (reason: as above)
    attend_stages,
    attend_warps,
    combination,
    copies_values,
    query_columns,
)
from mycli.runtime.kernels.triton.product.tiles import Chip  # noqa: E402  (reason: as above)
from tests.ptx import builds  # noqa: E402  (reason: as above)
from tests.support.grids import chosen  # noqa: E402  (reason: as above)

GROUP = 4


def shared(capability: int, head_dim: int, tokens: int, kind: str, stages: int) -> int:
    """Return the bytes of shared memory that the compiled kernel uses."""
    name = f"attend{kind and ' '}{kind} to 8"
    build = next(build for build in builds.decode_builds(capability) if build.name == name)
    queries = query_columns(tokens, GROUP)
    warps = attend_warps(queries)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "TOKENS": tokens, "BLOCK_Q": queries}
    sizes["UPRIGHT"] = copies_values(Chip(divmod(capability, 10), 132), head_dim, queries, 1 if kind else 2)
    constants = {**build.constants, **sizes, **combination(tokens, GROUP, head_dim, 128, 32, warps)}
    compiled = replace(build, constants=constants, warps=warps, stages=stages).compile(
        GPUTarget("cuda", capability, 32)
    )
    return int(compiled.metadata.shared)


EVERY = product((80, 89, 90, 100, 120), (64, 128, 256), (1, 8, 16), ("", "int8", "int4"))
WIDE = product((80, 89, 90, 120), (512,), (1,), ("",))
QUICK = [(89, 256, 1, "")]  # heads of 256 on a small chip, where three stages do not fit; others are slow to compile


@pytest.mark.parametrize(("capability", "head_dim", "tokens", "kind"), chosen([*EVERY, *WIDE], QUICK))
def test_the_stages_fit(capability: int, head_dim: int, tokens: int, kind: str) -> None:
    chip = Chip(divmod(capability, 10), 132)
    stages = attend_stages(chip, head_dim, query_columns(tokens, GROUP), 1 if kind else 2)
    assert stages >= 1
    assert shared(capability, head_dim, tokens, kind, stages) <= chip.shared


PROMPTS = product((80, 89, 90, 120), (64, 128, 256))


@pytest.mark.parametrize(("capability", "head_dim"), chosen(PROMPTS, [(89, 256)]))
def test_tiles_of_prompts_fit(capability: int, head_dim: int) -> None:
    chip = Chip(divmod(capability, 10), 132)
    for build in builds.prompt_builds(capability, [head_dim]):
        compiled = build.compile(GPUTarget("cuda", capability, 32))
        assert compiled.metadata.shared <= chip.shared, build.name


def test_three_stages_of_wide_heads_do_not_fit_a_small_chip() -> None:
    """A pass with three stages would fail on such a chip."""
    assert shared(89, 256, 1, "", 3) > Chip((8, 9), 128).shared


def test_what_fits_nowhere_is_not_taken() -> None:
    assert attend_stages(Chip((8, 9), 128), 1024, 64, 2) == 0
    assert attend_stages(Chip((8, 9), 128), 128, 8, 2) == attend_stages(Chip((9, 0), 132), 128, 32, 2) == 3
