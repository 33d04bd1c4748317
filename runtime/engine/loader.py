"""From a folder to a model that can run: every check that needs no memory first, then tensors straight into place."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mycli.runtime.checkpoint.formats import describe
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.placement import Placement, free_memory
from mycli.runtime.device.system import cpu, give_back
from mycli.runtime.errors import ResourceError
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.estimate import DEFAULT_CONTEXT, Plan, estimate, longest_context
from mycli.runtime.memory.fit import SHORTEST_CONTEXT, preflight, shortage


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
    if placement.shadow:
        model.keep_dense_copies()
    give_back()  # what was read and then laid out otherwise: a tenth of a packed model
    if packings and placement.device.type == "cuda":
        from mycli.runtime.engine.device_loop import accelerate

        accelerate(model, warn)
    return model


def _plan(folder: Path, placement: Placement, context: int, sequences: int, draft: Path | None) -> Plan:
    config, packings = describe(folder)
    dtype = placement.dtype_name
    second = None if draft is None else Plan(*describe(draft), dtype=dtype, kv=placement.kv)
    gpu = placement.device.type == "cuda"
    return Plan(config, packings, context, sequences, dtype, gpu, second, placement.kv, placement.shadow, cpu().tiles)


def _place_name(placement: Placement) -> str:
    return "main memory" if placement.device.type == "cpu" else str(placement.device)


def plan_memory(
    folder: Path, placement: Placement, context: int | None, sequences: int = 1, draft: Path | None = None
) -> int:
    """The context in tokens to make a cache for `sequences`, after checking that everything fits the free memory.

    `draft`: the folder of a second model with a cache of its own.
    `context` None: the model's own context, but at most `DEFAULT_CONTEXT`, or less where memory is short. Raises
    ResourceError with what is needed, what is free and the smallest change that fits.
    """
    usual = min(describe(folder)[0].max_context, DEFAULT_CONTEXT)
    plan = _plan(folder, placement, context or usual, sequences, draft)
    free = free_memory(placement.device)
    if context is None:
        fitting = longest_context(plan, free, started=True)
        plan = replace(plan, context=min(usual, max(fitting, SHORTEST_CONTEXT)))
    preflight(plan, free, _place_name(placement))
    return plan.context


def out_of_memory(
    folder: Path, placement: Placement, context: int, sequences: int = 1, draft: Path | None = None
) -> ResourceError:
    """What to say when memory ran out although `plan_memory` found enough; what was loaded must be let go of before."""
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = _plan(folder, placement, context, sequences, draft)
    free = free_memory(placement.device) + estimate(plan).runtime  # of this process, which has it already
    return shortage(plan, free, _place_name(placement))
