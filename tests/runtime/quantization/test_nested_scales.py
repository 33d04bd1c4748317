"""Test nested quantization of scales: bitsandbytes' table and codes bit for bit, and the nearest code for any scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.quantization.nested_scales import NESTED, dynamic_table, nest
from tests.support.foreign_layouts import stored, weights

THEIRS = {name: case for name, case in stored("bitsandbytes").items() if name.endswith("-nested")}


@pytest.mark.parametrize("name", THEIRS)
def test_table_codes_and_scales_of_scales_are_the_makers(name: str) -> None:
    """The scales are the largest weights of blocks, which is what bitsandbytes nests."""
    case, block = THEIRS[name], int(name.split("-")[1][1:])
    flat = weights(block + 1, *case.shape).bfloat16().float().flatten()
    scales = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block).abs().amax(1)
    found = nest(scales)
    assert torch.equal(dynamic_table(), case.tensors["weight.nested_quant_map"])
    assert torch.equal(found.codes, case.tensors["weight.absmax"])
    assert torch.equal(found.outer, case.tensors["weight.nested_absmax"])
    described = next(tensor for part, tensor in case.tensors.items() if "quant_state" in part)
    assert f'"nested_offset": {found.offset}' in bytes(described.tolist()).decode()


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 3 * NESTED), spread=st.floats(0, 1e6), mean=st.floats(-1e6, 1e6), seed=st.integers(0, 99))
def test_each_scale_has_the_nearest_code(count: int, spread: float, mean: float, seed: int) -> None:
    scales = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * spread + mean
    found, table = nest(scales), dynamic_table()
    restored = found.values(table)
    outer = found.outer.repeat_interleave(NESTED)[:count]
    every = table * outer.unsqueeze(1) + found.offset  # [scales, 256]
    nearest = (every - scales.unsqueeze(1)).abs().amin(1)
    rounding = 4 * torch.finfo(torch.float32).eps * (scales.abs() + abs(found.offset) + outer)
    assert ((restored - scales).abs() <= nearest + rounding).all()
    assert torch.isfinite(restored).all()
