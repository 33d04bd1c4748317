"""The tests of bits per weight in the tables of peers: those of the files, and of all linears."""

from pathlib import Path

import pytest
import torch

from mycli.quant.recipe import Recipe
from tests.benchmarks.peers import Shown, ours, packed_bits
from tests.support.paths import DRAFT


@pytest.mark.parametrize(("bits", "group", "expected"), [(4, 64, 4.25), (3, 128, 3.125), (2, 32, 2.5)])
def test_bits_per_weight_count_codes_and_scales(tmp_path: Path, bits: int, group: int, expected: float) -> None:
    made = ours(Shown(DRAFT, torch.zeros(2, 256), tmp_path), Recipe("rtn", bits, group), "rounded")
    assert made.bits == expected


def test_a_model_that_is_not_quantized_has_none() -> None:
    with pytest.raises(AssertionError, match="not quantized"):
        packed_bits(DRAFT)
