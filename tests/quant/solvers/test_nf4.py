"""Test NF4: codes are the nearest table entries for the stored scales, with less error than bitsandbytes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, relative_error
from mycli.quant.solvers import nf4
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.nested_scales import dynamic_table
from mycli.runtime.quantization.scheme import parse_packing
from tests.runtime.checkpoint.test_foreign_layouts import read
from tests.support.foreign_layouts import stored, weights


def grid(group: int, search: str = "mse") -> Grid:
    return Grid(parse_packing(f"nf4-g{group}"), torch.bfloat16, "absmax" if search == "absmax" else "mse")


def solved(weight: Tensor, group: int, search: str = "mse") -> Quantized:
    return nf4.solve(weight, grid(group, search)).quantized


@pytest.mark.parametrize(("rows", "columns", "group"), [(3, 64, 64), (16, 256, 32), (5, 384, 128)])
@pytest.mark.parametrize("search", ["mse", "absmax"])
def test_codes_are_the_nearest_for_the_scales_that_are_stored(rows: int, columns: int, group: int, search: str) -> None:
    weight = weights(rows, rows, columns).bfloat16()
    found = solved(weight, group, search)
    assert found.nested is not None and found.scales.shape == (rows, columns // group)
    assert torch.equal(found.nested.values(dynamic_table()).view(rows, -1), found.scales)
    table = code_table(grid(group).packing)
    scales = found.scales.repeat_interleave(group, 1)
    nearest = (table * scales.unsqueeze(-1) - weight.float().unsqueeze(-1)).abs().amin(-1)
    restored = dequantize_codes(found, grid(group))
    assert torch.allclose((restored - weight.float()).abs(), nearest, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("search", ["mse", "absmax"])
@pytest.mark.parametrize("name", ["nf4-g64-nested", "nf4-g64"])
def test_no_more_is_lost_than_by_the_maker(name: str, search: str, tmp_path: Path) -> None:
    """bitsandbytes chooses codes for the scales before nesting; without nesting it uses more bits."""
    case = stored("bitsandbytes")[name]
    given = weights(64 + name.endswith("nested"), *case.shape).bfloat16().float()
    theirs = float((read(tmp_path, case)[1].float() - given).square().sum() / given.square().sum())
    ours = relative_error(given, solved(given, 64, search), grid(64))
    assert ours < (0.97 if search == "mse" else 1.0 if name.endswith("nested") else 1.01) * theirs


def test_the_search_is_never_worse_than_the_largest_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(64, 4, 32, generator=generator) * torch.rand(64, 4, 1, generator=generator) ** 8
    part[0] = 0
    part[1, :, 5] = 100.0
    table, largest = code_table(grid(32).packing), part.abs().amax(-1)

    def lost(scales: Tensor) -> Tensor:
        every = table * scales[:, :, None, None] - part.unsqueeze(-1)
        return every.square().amin(-1).sum(-1)

    found, plain = lost(nf4._least_squares(part, largest, table)), lost(largest)
    assert (found <= plain * (1 + 1e-5)).all() and found[2:].sum() < 0.97 * plain[2:].sum()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_search_in_400_steps_gains_less(group: int) -> None:
    part = weights(7, 64, 4 * group).view(64, 4, group)
    table, largest = code_table(grid(group).packing), part.abs().amax(-1)

    def lost(scales: Tensor) -> Tensor:
        return (table * scales[:, :, None, None] - part.unsqueeze(-1)).square().amin(-1).sum(-1)

    finer = torch.stack([lost(largest * share) for share in torch.linspace(0.7, 1.1, 400)]).amin(0)
    assert lost(nf4._least_squares(part, largest, table)).sum() < 1.002 * finer.sum()


def test_groups_of_zeros_stay_zero() -> None:
    weight = weights(1, 4, 128)
    weight[1], weight[3, :64] = 0, 0
    restored = dequantize_codes(solved(weight, 64), grid(64))
    assert not restored[1].any() and not restored[3, :64].any()
    assert not dequantize_codes(solved(torch.zeros(2, 64), 64), grid(64)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    weight = weights(1, 4, 128)
    weight[2, 3] = bad
    with pytest.raises(ModelError, match="NaN or infinity"):
        nf4.solve(weight, grid(64))
