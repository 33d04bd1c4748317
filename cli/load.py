"""What commands do before the first token: resolve, place, check memory, load, and announce each choice."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call, subject_of
from mycli.cli.text.format import experts_held
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.prefetch import read_ahead
from mycli.runtime.device.system import resident
from mycli.runtime.engine.config import MTP, NGRAM, EngineConfig
from mycli.runtime.errors import ModelError, NotFoundError, UsageError, UserError
from mycli.runtime.hub.names import is_hub_name, split_file, split_name
from mycli.runtime.hub.resolve import Source, resolve, resolve_adapter
from mycli.runtime.utils.collection import exempt_from_collection, no_collection
from mycli.runtime.utils.json_fields import MAX_JSON_BYTES, parse_object

if TYPE_CHECKING:  # torch takes a second to import; light commands share this module's callers
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.engine.completion import LoadedModel
    from mycli.runtime.engine.engine import Engine
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedEngine:
    """A model that can answer, and what answers with it."""

    source: Source
    placement: "Placement"
    model: "LoadedModel"
    engine: "Engine"

    @property
    def longest_context(self) -> bool:
        """Whether a sequence holds as much as the model was made for."""
        return self.engine.context >= self.model.runner.config.max_context

    def tokens_read(self) -> int:
        """Tokens of the conversation that are in the cache: how far a prompt has been read."""
        return self.engine.tokens_read

    def memory(self) -> int:
        """Bytes that the process holds where the model runs, Python and torch included: of main memory or the GPU's."""
        if self.placement.device.type == "cuda":
            import torch

            return torch.cuda.memory_reserved(self.placement.device)
        return resident() or self.engine.nbytes


def load_engine(call: Call, model: str, engine: EngineConfig) -> LoadedEngine:
    """Load MODEL as `engine` says; without a context in it, with the model's own, or as much as fits.

    Says on stderr where it runs and what could not be done as asked.
    """
    source = resolve(model, offline=call.offline)
    read_ahead(source.folder)  # before torch is imported, which takes as long
    folder = adapted(call, ModelFolder.open(source.folder), model, engine.adapter)
    check_context(folder, engine)
    tokenizer = open_tokenizer(folder)
    first = "torch" not in sys.modules  # a second model must leave to be collected what the first one was
    with no_collection():  # imports make no garbage: a sixth of their time
        import torch

        from mycli.cli.open_engine import open_engine
        from mycli.runtime.engine.loader import out_of_memory, plan_memory
    if first:
        exempt_from_collection()

    draft = None
    if engine.draft not in (None, NGRAM, MTP):
        with about(call, engine.draft):
            draft = ModelFolder.open(resolve(engine.draft, offline=call.offline).folder)
    if engine.draft == MTP:
        draft = find_predictor(folder)
    placement = engine.place(folder.config)
    announce_placement(call, placement)
    planned = plan_memory(folder, placement, engine, draft)
    most = folder.config.max_context
    if engine.context is None and planned.context < most:
        call.out.note(f"context {planned.context} of the model's {most} tokens: --ctx asks for more")
    announce_experts(call, planned)
    engine = replace(engine, context=planned.context, sequences=planned.batch)
    announce_build(call, placement)
    with suppress(torch.OutOfMemoryError):
        made = open_engine(call, folder, tokenizer, placement, engine, draft, planned.expert_slots)
        opened = LoadedEngine(source, placement, *made)
        call.out.subject = replace(call.out.subject, longest_context=opened.longest_context)
        return opened
    # Here nothing of what was loaded is held any more, so what is free is what another try would find.
    raise out_of_memory(folder, placement, engine, draft)


def find_predictor(folder: ModelFolder) -> ModelFolder:
    """The head of a folder that predicts further tokens. Raises ModelError where it holds none."""
    if folder.predictor is None:
        kind = folder.config.model_type
        known = f"{kind} models have none" if folder.config.predictor is None else "the folder holds no mtp.* tensors"
        raise ModelError(f"no head that predicts further tokens: {known}", code="other-draft")
    return folder.predictor


def adapted(call: Call, folder: ModelFolder, model: str, adapter: str | None) -> ModelFolder:
    """The `model` in `folder` with `adapter` in it, where one is named; says where that was made for another model."""
    if adapter is None:
        return folder
    with about(call, adapter):
        found = resolve_adapter(adapter, offline=call.offline)
        merged = folder.with_adapter(found.label, found.folder)
    made = merged.adapter
    assert made is not None
    base, own = Path(made.config.base).name, Path(model.partition("@")[0]).name
    if base and base.lower() != own.lower():
        call.out.note(f"{adapter} was trained on {made.config.base}")
    if made.unused:
        call.out.warn(f"{adapter}: {len(made.unused)} of its modules are not part of the text model and are not used")
    return merged


def open_config(call: Call, model: str, fetch: bool = True) -> ModelFolder:
    """The folder, or for a model that is only on the hub its config.json alone, if it may be fetched."""
    try:
        return ModelFolder.open(resolve(model, offline=call.offline).folder)
    except NotFoundError:
        if not fetch or call.offline or not is_hub_name(model):
            raise
    repo, revision = split_name(model)
    from mycli.runtime.hub.client import Hub

    with Hub.connect(call.out.note) as hub:
        if split_file(model)[1] is not None:
            from mycli.runtime.hub.download import plan_download
            from mycli.runtime.hub.model_info import fetch_gguf

            return fetch_gguf(hub, plan_download(hub, model))
        commit = hub.commit(repo, revision)
        data = hub.read(repo, commit, "config.json", 0, MAX_JSON_BYTES + 1)
    return ModelFolder.of(parse_object(data, f"{repo}: config.json"))


@contextmanager
def about(call: Call, model: str) -> Iterator[None]:
    """What goes wrong within it is about `model`, whatever the command is about."""
    before, call.out.subject = call.out.subject, subject_of(model)
    yield
    call.out.subject = before


def open_tokenizer(folder: ModelFolder) -> "Tokenizer | None":
    """The tokenizer, what renders its conversations being started beside what comes next.

    None where it cannot be read: whoever needs it finds out why.
    """
    with suppress(UserError):
        tokenizer = folder.tokenizer()
        if tokenizer.template is not None:
            tokenizer.template.start()
        return tokenizer
    return None


def check_context(folder: ModelFolder, engine: EngineConfig) -> None:
    """Raises UsageError for a context that is longer than the model was made for: its replies would be noise."""
    longest = folder.config.max_context
    if engine.context is not None and not 1 < engine.context <= longest:
        problem = f"more than the {longest} tokens this model was made for" if engine.context > longest else "too small"
        raise UsageError(f"--ctx {engine.context} is {problem}", f"choose between 2 and {longest}")


def announce_placement(call: Call, placement: "Placement") -> None:
    """Say where the model runs, as far as that is not what a person expects."""
    for note in placement.notes:
        call.out.note(note)
    for detail in placement.details:
        call.out.detail(detail)


def announce_experts(call: Call, plan: "MemoryPlan") -> None:
    """Say how many experts are in memory, where not all are."""
    if plan.expert_slots is not None:
        call.out.note(f"experts: {experts_held(plan)}")


def announce_build(call: Call, placement: "Placement") -> None:
    """Build the CPU's native code where that has not been done, and say so: it takes seconds."""
    from mycli.runtime.kernels.cpu.library.build import must_be_built, native

    if placement.device.type == "cpu" and must_be_built():
        call.out.note("building the CPU kernel, once: it takes about a minute")
        if isinstance(found := native(), str):
            call.out.warn(f"it could not be built, so replies are slower: {found}")
