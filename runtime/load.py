"""From a folder to a model that can run: every check that needs no memory first, then tensors straight into place."""

from dataclasses import replace
from pathlib import Path

import torch

from mycli.runtime import machine
from mycli.runtime.checkpoint import Checkpoint
from mycli.runtime.device import TORCH_DTYPES, Placement
from mycli.runtime.estimate import DEFAULT_CONTEXT, Plan, longest_context
from mycli.runtime.fit import SHORTEST_CONTEXT, preflight
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


def plan_memory(folder: Path, placement: Placement, context: int | None) -> int:
    """The context in tokens to make a cache for, after checking that everything fits the free memory.

    `context` None: the model's own context, but at most `DEFAULT_CONTEXT`, or less where memory is short. Raises
    ResourceError with what is needed, what is free and the smallest change that fits.
    """
    config, packings = describe(folder)
    device = placement.device
    dtype = next(name for name, dtype in TORCH_DTYPES.items() if dtype == placement.dtype)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = machine.memory().available
    plan = Plan(config, packings, min(config.max_context, DEFAULT_CONTEXT), dtype=dtype, gpu=device.type == "cuda")
    if context is None:
        plan = replace(plan, context=max(min(plan.context, longest_context(plan, free)), SHORTEST_CONTEXT))
    else:
        plan = replace(plan, context=context)
    preflight(plan, free, "main memory" if device.type == "cpu" else str(device))
    return plan.context
