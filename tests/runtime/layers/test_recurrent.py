"""Test recurrent layers on their own; tests/runtime/engine/test_recurrent.py tests their states in the engine."""

from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.recurrent import make_mixer
from mycli.runtime.models.recurrent_spec import KimiDeltaSpec
from tests.support.families import CASES, make


@pytest.mark.parametrize("case", ["kimi_linear-8top3", "bailing_hybrid-8top3"])
def test_the_memory_model_counts_the_operands_of_kimi_delta_attention(case: str, tmp_path: Path) -> None:
    """Besides the outputs of products and the rows: queries, keys and decays in fp32, what is read, and gated."""
    make(tmp_path, *CASES[case])
    specs = (spec.recurrent for spec in open_model_folder(tmp_path).config.layer_specs)
    spec = next(spec for spec in specs if isinstance(spec, KimiDeltaSpec))
    part = make_mixer(spec, 0)
    outputs = sum(linear.out_features for linear in part.modules() if isinstance(linear, Linear))
    assert spec.forward_values() == outputs + sum(part.widths) + (2 * 3 + 1 + 1) * spec.width
