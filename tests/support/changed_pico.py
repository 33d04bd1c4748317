"""Writes pico with other tensors, and other fields in its config.json."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.paths import PICO


def write_changed(
    out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], fields: Mapping[str, Any] | None = None
) -> Path:
    shutil.copytree(PICO, out)
    config, weights = out / "config.json", out / "model.safetensors"
    for path in (config, weights):
        path.chmod(0o644)
    config.write_text(json.dumps({**json.loads(config.read_text()), **(fields or {})}, indent=2))
    save_file(change(load_file(weights)), weights, metadata={"format": "pt"})
    return out
