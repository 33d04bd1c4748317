"""From a folder to a model that can run: every check that needs no memory first, then tensors straight into place."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mycli.runtime.checkpoint import Checkpoint
from mycli.runtime.device import TORCH_DTYPES, Placement, free_memory
from mycli.runtime.estimate import DEFAULT_CONTEXT, Plan, longest_context
from mycli.runtime.fit import SHORTEST_CONTEXT, preflight
from mycli.runtime.manifest import Manifest
from mycli.runtime.packing import describe
from mycli.runtime.transformer import Transformer


def load_model(
    folder: Path,
    placement: Placement,
    *,
    allow_nonfinite: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> Transformer:
    """The model of `folder` on `placement`; `warn` is told what a person should know of the files.

    Raises ModelError for anything the files and the config disagree on, and for weights that are NaN or infinite unless
    `allow_nonfinite`.
    """
    config, packings = describe(folder)
    manifest = Manifest.open(folder)
    manifest.check(config, packings)
    checkpoint = Checkpoint(manifest, allow_nonfinite=allow_nonfinite)
    for warning in manifest.warnings:
        warn(warning)
    if config.tie_embeddings and checkpoint.tied_head_differs():
        warn("lm_head.weight differs from the embedding, but config.json ties them: the embedding is used")
    model = Transformer(config, placement.kv)
    model.load(checkpoint, packings, placement.device, placement.dtype)
    return model


def plan_memory(
    folder: Path, placement: Placement, context: int | None, sequences: int = 1, draft: Path | None = None
) -> int:
    """The context in tokens to make a cache for `sequences`, after checking that everything fits the free memory.

    `draft`: the folder of a second model with a cache of its own.
    `context` None: the model's own context, but at most `DEFAULT_CONTEXT`, or less where memory is short. Raises
    ResourceError with what is needed, what is free and the smallest change that fits.
    """
    config, packings = describe(folder)
    device = placement.device
    dtype = next(name for name, dtype in TORCH_DTYPES.items() if dtype == placement.dtype)
    free = free_memory(device)
    usual = min(config.max_context, DEFAULT_CONTEXT)
    plan = Plan(config, packings, usual, sequences, dtype, device.type == "cuda", kv=placement.kv)
    if draft is not None:
        plan = replace(plan, draft=Plan(*describe(draft), dtype=dtype, kv=placement.kv))
    if context is None:
        fitting = longest_context(plan, free, started=True)
        plan = replace(plan, context=min(usual, max(fitting, SHORTEST_CONTEXT)))
    else:
        plan = replace(plan, context=context)
    preflight(plan, free, "main memory" if device.type == "cpu" else str(device))
    return plan.context
