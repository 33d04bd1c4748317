"""Test reading the record of calls back from `mycli.json`."""

from dataclasses import asdict, replace

import pytest

from mycli.quant.calls.record import CallCounts, CallQuality, TokenAgreement, read_call_quality
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields

QUALITY = CallQuality(
    24, TokenAgreement(90, 0.25, 0.75), {"names": TokenAgreement(9, 0.5, 0.5)}, CallCounts(20, 18), CallCounts(14, 9)
)


def record(calls: object) -> Fields:
    return Fields({"card": {"calls": calls}}, "mycli.json")


def test_a_record_is_read_as_it_was_written() -> None:
    assert read_call_quality(record(asdict(QUALITY))) == QUALITY
    skipped = replace(QUALITY, before=None, after=None, skipped="too large")
    assert read_call_quality(record(asdict(skipped))) == skipped
    assert read_call_quality(None) is None and read_call_quality(record(None)) is None
    assert read_call_quality(Fields({"card": None}, "mycli.json")) is None


def test_the_loss_is_a_share_of_the_prompts() -> None:
    assert QUALITY.loss == 6 / 24
    assert replace(QUALITY, after=CallCounts(22, 0)).loss == -2 / 24
    assert replace(QUALITY, before=CallCounts(0, 0)).loss is None, "nothing could be lost"
    assert replace(QUALITY, before=None, after=None).loss is None


@pytest.mark.parametrize("field", ["prompts", "structure"])
def test_damaged_records_are_refused(field: str) -> None:
    with pytest.raises(ModelError, match=field):
        read_call_quality(record({**asdict(QUALITY), field: "x"}))
