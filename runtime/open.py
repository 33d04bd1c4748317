"""Opens a model: from its name to an engine that answers. The one place where an engine is put together.

Errors that need no weights (name, config, adapter, context) are raised before torch is imported, which takes seconds.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.stable_file import prefetch_files
from mycli.runtime.engine.config import MTP, NGRAM, EngineConfig
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.errors import Declined, ModelError, UsageError, UserError
from mycli.runtime.hub.resolve import Source, resolve, resolve_adapter
from mycli.runtime.tokenizer.chat_template import TemplateOptions
from mycli.runtime.utils.memory import gc_freeze, gc_paused

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.cache.prefix_store import PrefixStore
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.engine.loading.loader import LoadedModel
    from mycli.runtime.memory.cache_shape import CacheShape
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.speculative.proposers import Proposer
    from mycli.runtime.speculative.speculator import ProposerSpeculator
    from mycli.runtime.tokenizer.tokenizer import Tokenizer


class OpenReport:
    """Receives what a user should know while a model is opened. This one ignores everything; override what to show."""

    def warn(self, warning: str | Declined) -> None:
        """Something is wrong or missing, but the model can be used."""

    def note(self, text: str) -> None:
        """Something a user may not expect."""

    def placed(self, placement: "Placement") -> None:
        """The device and dtype have been chosen; memory has not been checked."""

    def planned(self, folder: ModelFolder, plan: "MemoryPlan") -> None:
        """The model fits the free memory as `plan` says; its weights are loaded next."""


def open_model(
    name: str | Path,
    config: EngineConfig = EngineConfig(),  # noqa: B008  # frozen
    *,
    offline: bool = False,
    report: OpenReport = OpenReport(),  # noqa: B008  # stateless
) -> OpenedModel:
    """Load a model by name, folder or GGUF file, and build its engine as `config` says.

    Without a context in `config`: the model's own, at most 8192 tokens, or less if memory is short. Raises UserError;
    its `model` names the adapter or draft if that is at fault.
    """
    name = str(name)
    source = resolve(name, offline=offline)
    prefetch_files(source.folder)  # before torch is imported, which takes as long as reading
    folder = source.open()
    if config.adapter is not None:
        folder = add_adapter(folder, name, config.adapter, offline=offline, report=report)
    return open_folder(source, folder, config, offline=offline, report=report)


def open_folder(
    source: Source,
    folder: ModelFolder,
    config: EngineConfig,
    *,
    offline: bool = False,
    report: OpenReport = OpenReport(),  # noqa: B008  # stateless
) -> OpenedModel:
    """Do what `open_model` does, for a folder that is open and has its adapter."""
    check_context(folder, config.context)
    tokenizer = _tokenizer(folder, config.template)
    # Objects that exist before torch is imported stay until the end; with a second model, those of the first must not.
    first = "torch" not in sys.modules
    with gc_paused():  # importing creates no garbage: collecting took a sixth of its time
        import torch

        from mycli.runtime.engine.loading.loader import out_of_memory, plan_memory
    if first:
        gc_freeze()

    def open_draft(name: str) -> ModelFolder:
        with _errors_about(name):
            return resolve(name, offline=offline).open()

    draft = draft_folder(folder, config.draft, open_draft)
    placement = config.place(folder.config)
    report.placed(placement)
    plan = plan_memory(folder, placement, config, draft)
    report.planned(folder, plan)
    with suppress(torch.OutOfMemoryError):
        return _build(source, folder, tokenizer, placement, plan, config, draft, report)
    # Outside the block: nothing that was loaded is referenced any more, so the error counts the memory of another try.
    raise out_of_memory(folder, placement, replace(config, context=plan.context, sequences=plan.batch), draft)


def _build(
    source: Source,
    folder: ModelFolder,
    tokenizer: "Tokenizer | None",
    placement: "Placement",
    plan: "MemoryPlan",
    config: EngineConfig,
    draft: ModelFolder | None,
    report: OpenReport,
) -> OpenedModel:
    from mycli.runtime.engine.engine import Engine
    from mycli.runtime.engine.loading.loader import LoadedModel

    running = config.running or plan.batch
    shape = plan.cache_shape
    loaded = LoadedModel.load(
        folder,
        placement,
        allow_nonfinite=config.allow_nonfinite,
        warn=report.warn,
        tokenizer=tokenizer,
        expert_slots=plan.expert_slots,
    )
    speculator = None
    if config.draft is not None:
        speculator = _speculator(_proposer(config.draft, draft, loaded, shape), placement, report)
    store = None
    if config.prefix_folder is not None:
        store = _prefix_store(config.prefix_folder, config.prefix_bytes, folder, loaded, plan.context, report)
    engine = Engine(
        loaded.runner,
        shape,
        loaded.vocabulary_size,
        running=min(running, shape.blocks),
        speculator=speculator,
        store=store,
    )
    if speculator is not None:
        from mycli.runtime.speculative.speculator import warm_up

        warm_up(engine)
    return OpenedModel(source, placement, plan, loaded, engine)


def _speculator(proposer: "Proposer", placement: "Placement", report: OpenReport) -> "ProposerSpeculator":
    from mycli.runtime.speculative.draft_length import AdaptiveDraftLength, draft_lengths
    from mycli.runtime.speculative.speculator import ProposerSpeculator

    cost, gpu = proposer.relative_cost, placement.device.type == "cuda"
    lengths = draft_lengths(cost, gpu)
    noted = list[str]()

    def note_once(text: str) -> None:  # there is a policy for each number of sequences, and all say the same
        if not noted:
            noted.append(text)
            report.note(text)

    return ProposerSpeculator(proposer, lambda: AdaptiveDraftLength(cost, note_once, lengths), pipelined=gpu)


def _proposer(name: str, draft: ModelFolder | None, loaded: "LoadedModel", shape: "CacheShape") -> "Proposer":
    from mycli.runtime.speculative.lookup import PromptLookup
    from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
    from mycli.runtime.speculative.proposers import load_draft

    if draft is None:
        return PromptLookup()
    if name == MTP:
        return MtpProposer(MtpHead(draft, loaded.runner), shape)
    with _errors_about(name):
        return load_draft(draft, loaded.tokenizer, loaded.runner, shape)


def _prefix_store(
    path: Path, nbytes: int, folder: ModelFolder, loaded: "LoadedModel", context: int, report: OpenReport
) -> "PrefixStore | None":
    from mycli.runtime.cache.prefix_store import PrefixStore, UntrustedError
    from mycli.runtime.engine.disk_prefix_cache import identity

    try:
        return PrefixStore(path, identity(folder, loaded.runner, context), nbytes, report.warn)
    except UntrustedError as error:
        report.warn(f"the prefix cache is not kept on disk: {error.message}; {error.hint}")
        return None


def add_adapter(
    folder: ModelFolder, model: str, adapter: str, *, offline: bool = False, report: OpenReport
) -> ModelFolder:
    """Return `folder` with the LoRA adapter of this name; reports one that was trained on another model."""
    if folder.adapter is not None:
        raise ModelError(f"{model} contains an adapter, and only one can be applied", "give its base model instead")
    with _errors_about(adapter):
        source = resolve_adapter(adapter, offline=offline)
        merged = folder.with_adapter(source.label, source.folder)
    assert merged.adapter is not None
    base = merged.adapter.config.base
    if base and Path(base).name.lower() != Path(model.partition("@")[0]).name.lower():
        report.note(f"{adapter} was trained on {base}")
    if unused := merged.adapter.unused:
        report.warn(f"{adapter}: {len(unused)} of its modules are not part of the text model and are not used")
    return merged


def check_context(folder: ModelFolder, context: int | None) -> None:
    """Raise UsageError if `context` is longer than the model was trained for: its replies would be noise."""
    longest = folder.config.max_context
    if context is not None and not 1 < context <= longest:
        problem = "too small" if context <= 1 else f"more than the {longest} tokens this model was trained for"
        raise UsageError(f"context of {context} tokens: {problem}", f"choose between 2 and {longest}")


def draft_folder(
    folder: ModelFolder, draft: str | None, open_other: Callable[[str], ModelFolder]
) -> ModelFolder | None:
    """Return the folder of `EngineConfig.draft`: the MTP head of `folder`, or another model, which `open_other` opens.

    None if no model drafts. Raises ModelError for a head that `folder` does not have.
    """
    if draft is None or draft == NGRAM:
        return None
    if draft != MTP:
        return open_other(draft)
    if folder.mtp_head is None:
        kind = folder.config.model_type
        cause = f"{kind} models have none" if folder.config.mtp is None else "its files have no mtp.* tensors"
        raise ModelError(f"no multi-token prediction head: {cause}", code="other-draft")
    return folder.mtp_head


def _tokenizer(folder: ModelFolder, options: TemplateOptions) -> "Tokenizer | None":
    # None if it cannot be read: `LoadedModel.load` then raises the reason, after what may be wrong with the config.
    try:
        tokenizer = folder.tokenizer()
    except UserError:
        return None
    tokenizer.use_template(options)
    if tokenizer.template is not None:
        tokenizer.template.start()  # a process, which starts while torch is imported
    return tokenizer


@contextmanager
def _errors_about(model: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.model = model
        raise
