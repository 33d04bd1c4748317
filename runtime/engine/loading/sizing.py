"""Chooses context, sequences and experts of a model for the memory that is free. Does not import torch."""

from dataclasses import replace

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.memory.estimate import estimate, longest_context
from mycli.runtime.memory.fit import SHORTEST_CONTEXT
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.utils.dtypes import Dtype


def requested_plan(
    folder: ModelFolder,
    engine: EngineConfig,
    draft: ModelFolder | None = None,
    *,
    dtype: Dtype | None = None,
    gpu: bool = False,
    unpacked: bool = False,
) -> MemoryPlan:
    """Return the plan of `engine` as if memory were unlimited; `unpacked`: packed weights are stored in `dtype`."""
    context, sequences = engine.context or min(folder.config.max_context, DEFAULT_CONTEXT), engine.sequences
    if engine.context is None and engine.running is not None:
        # Sequences that share a cache may be longer than their share of it, in the same memory.
        tokens = context * sequences
        context = min(folder.config.max_context, tokens)
        sequences = max(tokens // context, 1)
    dtype = dtype or engine.dtype
    draft_packings = {} if draft is None or unpacked else draft.packings
    return MemoryPlan(
        folder.config,
        {} if unpacked else folder.packings,
        context=context,
        batch=sequences,
        dtype=dtype,
        gpu=gpu,
        draft=None if draft is None else MemoryPlan(draft.config, draft_packings, dtype=dtype, kv=engine.kv),
        drafts_without_model=engine.draft is not None and draft is None,
        kv=engine.kv,
        prompt_copy="none" if unpacked else engine.prompt_copy,
        running=engine.running,
        adapter_values=folder.unmerged_values,
        whole_windows=engine.whole_windows or engine.prefix_folder is not None,  # files have all positions
    )


def fitting_plan(requested: MemoryPlan, engine: EngineConfig, free: int) -> MemoryPlan:
    """Return the largest plan within `requested` for `free` bytes of a process that has loaded torch.

    Only what `engine` leaves open is reduced: first the context, then the full-length sequences, then the experts in
    memory. The result may still be too large.
    """
    plan = _shortened(requested, free, engine)
    if engine.expert_bytes is None and estimate(plan).needed <= free:
        return plan
    from mycli.runtime.memory.resident import can_stream_experts, with_active_experts, with_fitting_experts

    if engine.expert_bytes is None and not can_stream_experts(requested):
        return plan
    active = _shortened(with_active_experts(requested), free, engine)
    return with_fitting_experts(active, free, engine.expert_bytes, started=True)


def _shortened(plan: MemoryPlan, free: int, engine: EngineConfig) -> MemoryPlan:
    if engine.context is None:
        fitting = longest_context(plan if engine.running is None else replace(plan, batch=1), free, started=True)
        plan = replace(plan, context=min(plan.context, max(fitting, SHORTEST_CONTEXT)))
    while engine.running is not None and plan.batch > 1 and estimate(plan).needed > free:
        plan = replace(plan, batch=plan.batch // 2)
    return plan
