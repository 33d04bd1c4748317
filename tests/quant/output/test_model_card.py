"""Test the record of a quantized model."""

import math
from pathlib import Path

from mycli.quant.output.model_card import Size, encode
from mycli.runtime.hub.resolve import Source
from mycli.runtime.utils.json_fields import strict_json


def test_the_record_of_a_collapsed_model_is_json() -> None:
    """Its perplexity may be infinite, for which JSON has no number."""
    data = encode(
        recipe={"method": "rtn"},
        calibration=None,
        source=Source("small", Path("small")),
        stored=None,
        adapter=None,
        size=Size(8, 2, 32.0, 2, 4.5),
        layers=(),
        tuning=None,
        card={"perplexity": {"value": math.inf, "error": None}, "kl_max": 3.5},
        source_files={},
        files={},
    )
    assert strict_json(data)["card"] == {"perplexity": {"value": None, "error": None}, "kl_max": 3.5}
