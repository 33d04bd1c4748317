"""Test the record of a quantized model."""

import hashlib
import math
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event

import pytest

from mycli.quant.output.model_card import Size, digests, encode
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


def test_files_are_named_by_their_place_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model" / "1_Pooling").mkdir(parents=True)
    paths = [tmp_path / "model" / "a.bin", tmp_path / "model" / "1_Pooling" / "config.json", tmp_path / "cache.bin"]
    for path in paths:
        path.write_bytes(b"abc")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    found = digests(paths, tmp_path / "model")
    assert found == dict.fromkeys(["1_Pooling/config.json", "a.bin", "cache.bin"], {"sha256": sha256, "bytes": 3})
    assert list(digests(paths)) == ["cache.bin", "config.json", "a.bin"]
    stop = Event()
    assert digests(paths[:1], stop=stop).keys() == {"a.bin"}
    stop.set()
    with pytest.raises(CancelledError):
        digests(paths[:1], stop=stop)
