"""From a folder to a model that can run: every check that needs no memory first, then tensors straight into place."""

from pathlib import Path

from mycli.runtime.checkpoint import Checkpoint
from mycli.runtime.config import ModelConfig, parse_config
from mycli.runtime.device import Placement
from mycli.runtime.fields import read_object
from mycli.runtime.manifest import Manifest
from mycli.runtime.packing import Packing, read_quantization
from mycli.runtime.transformer import Transformer


def linear_names(config: ModelConfig) -> list[str]:
    """Names of all linears that a checkpoint of `config` may hold quantized, the head included."""
    blocks = (config.block_linears(layer) for layer in range(config.layers))
    names = [linear.name for block in blocks for group in block.values() for linear in group]
    return names if config.tie_embeddings else [*names, config.head().name]


def describe(folder: Path) -> tuple[ModelConfig, dict[str, Packing]]:
    """What the model in `folder` is, and which of its linears are packed how, from config.json alone."""
    raw = read_object(folder / "config.json")
    config = parse_config(raw)
    return config, read_quantization(raw, linear_names(config))


def load_model(folder: Path, placement: Placement) -> Transformer:
    """The model of `folder` on `placement`. Raises ModelError for anything the files and the config disagree on."""
    config, packings = describe(folder)
    manifest = Manifest.open(folder)
    manifest.check(config, packings)
    model = Transformer(config)
    model.load(Checkpoint(manifest), packings, placement.device, placement.dtype)
    return model
