"""Test the memory that loading takes, with the command that compares it with the estimate."""

import subprocess
from pathlib import Path

from tests.support.command_line import COMMAND, Mycli
from tests.support.models import random_model


def test_buffers_of_a_gguf_file_are_not_held_until_all_layers_are_loaded(
    mycli: Mycli, environment: dict[str, str], tmp_path: Path
) -> None:
    """Held, they would be another seventh of the total. A fork would share the memory of Python and torch."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 256}
    folder, file = random_model(tmp_path / "model", 0.02, **shape), tmp_path / "model.gguf"
    assert mycli("export", str(folder), "--to", "gguf:bf16", "-o", str(file)).returncode == 0
    line = [*COMMAND, "estimate", str(file), "--verify", "--device", "cpu", "-c", "256", "--tol", "10%"]
    verified = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert verified.returncode == 0, verified.stderr
