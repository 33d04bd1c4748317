"""Test which products of recurrent mixers have an input whose factors another tensor can undo."""

import pytest

from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import CASES
from tests.support.family_parts import SMALL


@pytest.mark.parametrize(
    ("case", "entering", "leaving"),
    [
        ("mamba2-2-groups", "norm", "gated_norm"),
        ("mamba-tied", "norm", None),  # the scan is not linear in the rows of a product
        ("qwen3_next-8top3", None, None),  # the norm feeds the gates too, and that of heads undoes a factor
        ("kimi_linear-8top3", None, None),
    ],
)
def test_the_source_of_an_input_is_the_norm_before_it(case: str, entering: str | None, leaving: str | None) -> None:
    model_type, changes = CASES[case]
    config = parse_config(Fields({**SMALL, "model_type": model_type, **changes}, "config.json"))
    mixer = config.layer(0).mixer
    for product, norm in (("recurrent_in", entering), ("recurrent_out", leaving)):
        source = mixer.input_source(product)
        assert source is (norm and getattr(mixer, norm)) and (source is None) == (norm is None)
