"""Test the limits of `mycli quantize` before work begins; `reports/test_quantization.py` tests them on results."""

import math

import pytest

from mycli.cli.flags.gates import Gates
from mycli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("gates", "option"),
    [
        (Gates(max_kl=0.1), "--max-kl"),
        (Gates(max_call_loss=0.0), "--max-call-loss"),
        (Gates(max_kl=0.1, max_call_loss=0.1), "--max-kl"),
    ],
)
def test_a_limit_of_quality_needs_its_measurement(gates: Gates, option: str) -> None:
    gates.check_values("quick")
    with pytest.raises(UsageError, match=f"^{option} needs a quality measurement"):
        gates.check_values("none")
    assert gates.measured and not Gates().measured
    Gates().check_values("none")


@pytest.mark.parametrize("kl", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_nothing_can_keep_is_refused(kl: float) -> None:
    with pytest.raises(UsageError, match="--max-kl .* must be above 0"):
        Gates(max_kl=kl).check_values("quick")
