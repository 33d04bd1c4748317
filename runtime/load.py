"""From a folder to a model that can run: every check that needs no memory first, then tensors straight into place."""

from pathlib import Path

from mycli.runtime.checkpoint import Checkpoint
from mycli.runtime.device import Placement
from mycli.runtime.manifest import Manifest
from mycli.runtime.packing import describe
from mycli.runtime.transformer import Transformer


def load_model(folder: Path, placement: Placement) -> Transformer:
    """The model of `folder` on `placement`. Raises ModelError for anything the files and the config disagree on."""
    config, packings = describe(folder)
    manifest = Manifest.open(folder)
    manifest.check(config, packings)
    model = Transformer(config)
    model.load(Checkpoint(manifest), packings, placement.device, placement.dtype)
    return model
