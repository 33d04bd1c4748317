"""Loads a model: the memory plan, checks that need no weights, then tensors directly into their place."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement, free_memory
from mycli.runtime.device.system import release_free_memory
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.reference import DequantizeKernel
from mycli.runtime.kernels.registry import find_kernel
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.estimate import estimate, longest_context
from mycli.runtime.memory.fit import SHORTEST_CONTEXT, preflight, shortage
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils import version


def load_model(
    folder: ModelFolder,
    placement: Placement,
    *,
    allow_nonfinite: bool = False,
    warn: Callable[[str | Declined], None] = lambda warning: None,
    expert_slots: int | None = None,
) -> ModelRunner:
    """Load the weights of `folder`. `expert_slots`: experts per layer in memory, on the CPU; None for all.

    Raises ModelError if files and config disagree, and for NaN or infinite weights unless `allow_nonfinite`.
    """
    checkpoint = folder.checkpoint(allow_nonfinite=allow_nonfinite)
    for warning in folder.manifest.warnings:
        warn(warning)
    if folder.config.tie_embeddings and checkpoint.tied_head_differs():
        warn("lm_head.weight differs from the embedding, but config.json ties them: the embedding is used")
    model = Transformer(folder.config, expert_slots)
    activations, packings = None, folder.packings
    if packings:
        from mycli.runtime.engine.activations import activation_choice

        activations = activation_choice(folder, placement)
        packings = packings if activations is None else activations.packings(packings)
    model.load(checkpoint, packings, placement.device, placement.dtype)
    if folder.packings and placement.unpacked:
        warn(Declined("weights-unpacked", {"reason": placement.unpacked, "dtype": placement.dtype_name}))
    for slow in _unpacked_every_pass(folder, placement):
        warn(slow)
    if placement.dense_prefill_copy and not placement.unpacked:
        model.keep_dense_copies()
    release_free_memory()  # the buffers that weights were read into: a tenth of a packed model
    return ModelRunner(model, placement.kv, compile_passes(model, placement.kv, warn), activations)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, end tokens and sampling defaults, and what was wrong with its files.

    fingerprint: of everything that decides which tokens follow a prompt.
    """

    runner: ModelRunner
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    stop_ids: frozenset[int]
    warnings: tuple[str | Declined, ...]
    fingerprint: str = ""

    @property
    def vocabulary_size(self) -> int:
        # Rows that pad the head to a round number have no token and must not be sampled.
        vocabulary = self.tokenizer.vocabulary
        return max(index for index, token in enumerate(vocabulary) if token is not None) + 1

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        placement: Placement,
        *,
        allow_nonfinite: bool = False,
        warn: Callable[[str | Declined], None] = lambda warning: None,
        tokenizer: Tokenizer | None = None,
        expert_slots: int | None = None,
    ) -> "LoadedModel":
        """Load a model as `load_model` does. `warn` receives each warning immediately; `tokenizer`: if already open.

        Raises ModelError.
        """
        config = folder.config
        tokenizer = tokenizer or folder.tokenizer()  # before the weights: a broken one is found within milliseconds
        defaults, dropped = folder.generation
        ids, missing = stop_ids(defaults.eos, config.eos, tokenizer.eos, config.vocab_size)
        warnings: list[str | Declined] = []

        def add(warning: str | Declined) -> None:
            warnings.append(warning)
            warn(warning)

        for text in (*dropped, *missing):
            add(text)
        runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, warn=add, expert_slots=expert_slots)
        return cls(runner, tokenizer, defaults, frozenset(ids), tuple(warnings), _fingerprint(folder, runner))


def _fingerprint(folder: ModelFolder, runner: ModelRunner) -> str:
    # Files by size and time: hashing their contents would take as long as loading them.
    files = [(path.name, (info := path.stat()).st_size, info.st_mtime_ns) for path in folder.source_files()]
    bits = None if runner.activations is None else runner.activations.bits
    arithmetic = [runner.device.type, str(runner.dtype), runner.kv, bits, version()]
    return hashlib.sha256(json.dumps([sorted(files), arithmetic]).encode()).hexdigest()


def _unpacked_every_pass(folder: ModelFolder, placement: Placement) -> list[Declined]:
    packed = ((linear, folder.packings.get(linear.name)) for linear in folder.config.linears())
    shapes = {(packing, spec.out_features, spec.in_features) for spec, packing in packed if packing is not None}
    device, dtype = placement.device, placement.dtype
    name, slow = ("triton" if device.type == "cuda" else "cpu"), dict[str, Declined]()
    for packing, rows, columns in sorted(shapes, key=lambda shape: (shape[0].name, *shape[1:])):
        kernel, declined = find_kernel(packing, rows, columns, device, dtype)
        if kernel is not None and kernel.name == DequantizeKernel.name and packing.name not in slow:
            slow[packing.name] = Declined(
                "weights-decoded-every-pass", {"packing": packing.name, "kernel": name, "reason": declined[name]}
            )
    return list(slow.values())


def _packings(folder: ModelFolder, placement: Placement) -> Mapping[str, Packing]:
    return {} if placement.unpacked else folder.packings


def _plan(folder: ModelFolder, placement: Placement, engine: EngineConfig, draft: ModelFolder | None) -> MemoryPlan:
    dtype, kv = placement.dtype_name, placement.kv
    context, sequences = engine.context or min(folder.config.max_context, DEFAULT_CONTEXT), engine.sequences
    if engine.context is None and engine.running is not None:
        # Sequences that share a cache may be longer than their share of it, in the same memory.
        tokens = context * sequences
        context = min(folder.config.max_context, tokens)
        sequences = max(tokens // context, 1)
    return MemoryPlan(
        folder.config,
        _packings(folder, placement),
        context=context,
        batch=sequences,
        dtype=dtype,
        gpu=placement.device.type == "cuda",
        draft=None if draft is None else MemoryPlan(draft.config, _packings(draft, placement), dtype=dtype, kv=kv),
        kv=kv,
        shadow=placement.dense_prefill_copy and not placement.unpacked,
        running=engine.running,
    )


def _place_name(placement: Placement) -> str:
    return "main memory" if placement.device.type == "cpu" else str(placement.device)


def plan_memory(
    folder: ModelFolder, placement: Placement, engine: EngineConfig, draft: ModelFolder | None = None
) -> MemoryPlan:
    """Choose the context, the number of sequences and the experts in memory so that everything fits.

    A context that is not set is the model's own, at most `DEFAULT_CONTEXT`, or less if memory is short; where sequences
    share a cache, at most `DEFAULT_CONTEXT` for each full-length sequence together. Raises ResourceError with the bytes
    needed, the bytes free, and the smallest change that fits.
    """
    requested = _plan(folder, placement, engine, draft)
    free = free_memory(placement.device)
    plan = _shortened(requested, free, engine)
    if engine.expert_bytes is not None or estimate(plan).needed > free:
        plan = _with_streamed_experts(requested, plan, free, engine)
    preflight(plan, free, _place_name(placement))
    return plan


def _with_streamed_experts(requested: MemoryPlan, plan: MemoryPlan, free: int, engine: EngineConfig) -> MemoryPlan:
    from mycli.runtime.memory.resident import can_stream_experts, with_active_experts, with_fitting_experts

    if engine.expert_bytes is None and not can_stream_experts(requested):
        return plan
    active = _shortened(with_active_experts(requested), free, engine)
    return with_fitting_experts(active, free, engine.expert_bytes, started=True)


def _shortened(plan: MemoryPlan, free: int, engine: EngineConfig) -> MemoryPlan:
    # Only what `engine` leaves open: first the context, then the full-length sequences that share the cache.
    if engine.context is None:
        fitting = longest_context(plan if engine.running is None else replace(plan, batch=1), free, started=True)
        plan = replace(plan, context=min(plan.context, max(fitting, SHORTEST_CONTEXT)))
    while engine.running is not None and plan.batch > 1 and estimate(plan).needed > free:
        plan = replace(plan, batch=plan.batch // 2)
    return plan


def out_of_memory(
    folder: ModelFolder, placement: Placement, engine: EngineConfig, draft: ModelFolder | None = None
) -> ResourceError:
    """Return the error for running out of memory although `plan_memory` found enough. Free the model before."""
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = _plan(folder, placement, engine, draft)
    free = free_memory(placement.device) + estimate(plan).runtime  # which this process already has
    return shortage(plan, free, _place_name(placement))
