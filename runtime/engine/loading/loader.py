"""Loads a model: the memory plan, checks that need no weights, then tensors directly into their place."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement, free_memory
from mycli.runtime.device.system import release_free_memory
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.sizing import fitting_plan, requested_plan
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.reference import DequantizeKernel
from mycli.runtime.kernels.registry import find_kernel
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.fit import preflight, shortage
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.quantization.activations import UNMEASURED_FILE
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils import version

if TYPE_CHECKING:  # few models compute embeddings
    from mycli.runtime.checkpoint.sentence_transformers import ScoreSpec
    from mycli.runtime.engine.replies.cross_encoder import CrossEncoder
    from mycli.runtime.engine.replies.embedder import Embedder


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
    checkpoint = folder.checkpoint(allow_nonfinite=allow_nonfinite, dtype=placement.dtype)
    for warning in folder.manifest.warnings:
        warn(warning)
    model = Transformer(folder.config, expert_slots)
    if placement.portable:
        model.make_portable()
    activations, packings = None, folder.packings
    if packings:
        from mycli.runtime.engine.loading.activations import activation_choice

        activations = activation_choice(folder, placement)
        packings = packings if activations is None else activations.packings(packings)
    model.load(CheckpointWeights(checkpoint, packings, placement.device, placement.dtype))
    # A model that reads its experts from disk replaces weights as it runs: it keeps 16 bits.
    if activations == UNMEASURED_FILE and expert_slots is None:
        from mycli.runtime.engine.loading.activation_measurement import measure_choice

        activations = measure_choice(folder, model, placement.kv)
    if folder.packings and placement.unpacked:
        warn(Declined("weights-unpacked", {"reason": placement.unpacked, "dtype": placement.dtype_name}))
    for slow in _unpacked_every_pass(folder, placement):
        warn(slow)
    if placement.prompt_copy != "none" and (without := model.keep_prompt_copies(placement.prompt_copy)):
        warn(Declined("no-prompt-copy", {"count": without, "kind": placement.prompt_copy}))
    release_free_memory()  # the buffers that weights were read into: a tenth of a packed model
    passes = compile_passes(model, placement.kv, warn)
    if placement.portable:
        from mycli.runtime.engine.loading.portable import require_portable  # an option

        require_portable(folder, model, passes)
    return ModelRunner(model, placement.kv, passes, activations)


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
    embedder: "Embedder | None" = None  # of a model that computes embeddings
    fingerprint: str = ""
    score: "ScoreSpec | None" = None  # of a generative reranker that says it
    cross_encoder: "CrossEncoder | None" = None  # of a reranker with a head of its own

    @cached_property
    def vocabulary_size(self) -> int:
        return _vocabulary_size(self.tokenizer)

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
        size = _vocabulary_size(tokenizer)
        defaults = replace(defaults, suppressed=tuple(token for token in defaults.suppressed if token < size))
        ids, missing = stop_ids(defaults.eos, config.eos, tokenizer.eos, config.vocab_size)
        warnings: list[str | Declined] = []

        def add(warning: str | Declined) -> None:
            warnings.append(warning)
            warn(warning)

        for text in dropped if config.bidirectional else (*dropped, *missing):
            add(text)
        runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, warn=add, expert_slots=expert_slots)
        return cls(
            runner,
            tokenizer,
            defaults,
            frozenset(ids),
            tuple(warnings),
            _embedder(folder),
            _fingerprint(folder, runner),
            folder.score,
            _cross_encoder(folder, runner, tokenizer),
        )


def _embedder(folder: ModelFolder) -> "Embedder | None":
    if folder.embedding is None:
        return None
    from mycli.runtime.engine.replies.embedder import Embedder

    return Embedder(folder.embedding, folder.config.hidden_size)


def _cross_encoder(folder: ModelFolder, runner: ModelRunner, tokenizer: Tokenizer) -> "CrossEncoder | None":
    if folder.cross_encoder is None:
        return None
    from mycli.runtime.engine.replies.cross_encoder import CrossEncoder

    return CrossEncoder(folder.cross_encoder, runner.model, tokenizer)


def _vocabulary_size(tokenizer: Tokenizer) -> int:
    # Rows that pad the head to a round number have no token and must not be sampled.
    return max(index for index, token in enumerate(tokenizer.vocabulary) if token is not None) + 1


def _fingerprint(folder: ModelFolder, runner: ModelRunner) -> str:
    # Files by size and time: hashing their contents would take as long as loading them.
    files = [(path.name, (info := path.stat()).st_size, info.st_mtime_ns) for path in folder.source_files()]
    bits = None if runner.activations is None else runner.activations.bits
    arithmetic = [runner.device.type, str(runner.dtype), runner.kv, bits, runner.model.prompt_copy, version()]
    arithmetic += ["portable"] * runner.model.portable
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
    requested = _requested(folder, placement, engine, draft)
    free = free_memory(placement.device)
    if engine.memory_limit is not None:
        free = min(free, engine.memory_limit - estimate(requested).runtime)
    plan = fitting_plan(requested, engine, free)
    preflight(plan, free, _place_name(placement))
    return plan


def _requested(
    folder: ModelFolder, placement: Placement, engine: EngineConfig, draft: ModelFolder | None
) -> MemoryPlan:
    gpu, unpacked = placement.device.type == "cuda", placement.unpacked is not None
    return requested_plan(folder, engine, draft, dtype=placement.dtype_name, gpu=gpu, unpacked=unpacked)


def out_of_memory(
    folder: ModelFolder, placement: Placement, engine: EngineConfig, draft: ModelFolder | None = None
) -> ResourceError:
    """Return the error for running out of memory although `plan_memory` found enough. Free the model before."""
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = _requested(folder, placement, engine, draft)
    free = free_memory(placement.device) + estimate(plan).runtime  # which this process already has
    return shortage(plan, free, _place_name(placement))
