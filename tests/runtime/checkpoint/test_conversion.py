"""Test reading tensors to another dtype than the stored one, and the memory that it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.safetensors_header import SINGLE
from mycli.runtime.errors import ModelError

VALUES = (2 << 20) + 12_345  # in several parts, the last of which is short
MIB = 1 << 20

# Prints by how many bytes each way of reading an fp32 matrix of 128 MiB as bf16 raises the memory of the process.
MEMORY = """
import json, sys
from pathlib import Path
import torch
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.system import peak_resident, reset_peak, resident
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import LinearSpec

checkpoint, cpu = Checkpoint(Manifest.open(Path(sys.argv[1]))), torch.device("cpu")
weights, spec = CheckpointWeights(checkpoint, {}, cpu, torch.bfloat16), LinearSpec("head", 1 << 15, 1 << 10)
weights.read("norm")
raised = []
for read in (
    lambda: Linear([spec]).load(weights),
    lambda: weights.read("head.weight"),
    lambda: formats.read_dense(checkpoint, spec, {}, cpu, torch.bfloat16),
):
    able, before = reset_peak(), resident()
    read()
    raised.append(peak_resident() - before)
print(json.dumps(raised if able else None))
"""


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float16])
def test_each_part_is_converted(stored: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)).to(stored)
    save_file({"other": torch.ones(3), "w": tensor}, tmp_path / SINGLE)
    rows = torch.zeros(VALUES + 2, dtype=other)
    Checkpoint(Manifest.open(tmp_path)).read_into("w", rows[1:-1])
    assert torch.equal(rows[1:-1], tensor.to(other))
    assert rows[0] == rows[-1] == 0


def test_what_the_new_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 70_000.0])}, tmp_path / SINGLE)
    out = torch.empty(2, dtype=torch.float16)
    with pytest.raises(ModelError, match=f"^{SINGLE}: w, in float16: 1 of 2 values are NaN or infinite"):
        Checkpoint(Manifest.open(tmp_path)).read_into("w", out)
    Checkpoint(Manifest.open(tmp_path), allow_nonfinite=True).read_into("w", out)
    assert out.tolist() == [1.0, float("inf")]


def test_the_stored_form_is_never_whole_in_memory(tmp_path: Path) -> None:
    save_file({"head.weight": torch.zeros(1 << 15, 1 << 10), "norm": torch.ones(8)}, tmp_path / SINGLE)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    raised = json.loads(done.stdout)
    if raised is None:
        pytest.skip("the kernel does not reset the peak")
    assert max(raised) < 64 * MIB + 24 * MIB
