"""Test `mycli export`: what a format cannot hold exactly is refused, and rounded only with --requantize."""

import json
from pathlib import Path

from tests.support.command_line import Mycli
from tests.support.models import random_model


def test_weights_are_rounded_only_with_the_option(mycli: Mycli, tmp_path: Path) -> None:
    source, path = random_model(tmp_path / "source", num_hidden_layers=1), tmp_path / "a.gguf"
    command = ("export", str(source), "--to", "gguf:q8_0", "-o", str(path))
    refused = mycli(*command)
    assert refused.returncode == 3 and refused.stdout == "" and not path.exists()
    assert refused.stderr.endswith("hint: add --requantize to round these weights; the loss is reported\n")
    answer = json.loads(mycli(*command, "--requantize", "--json").stdout)
    assert answer["path"] == str(path) and path.stat().st_size == answer["bytes"]
    errors = [tensor["error"] for tensor in answer["rounded"]]
    assert len(errors) > 7 and errors == sorted(errors, reverse=True) and errors[-1] > 0
    assert mycli(*command, "--requantize").returncode == 2, "it exists"
    assert mycli(*command, "--requantize", "--overwrite").returncode == 0
