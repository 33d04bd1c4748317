"""Opens a model: from its name to an engine that answers. The one place where an engine is put together.

Errors that need no weights (name, config, adapter, context) are raised before torch is imported, which takes seconds.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack, overload

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.stable_file import prefetch_files
from mycli.runtime.device.system import resident
from mycli.runtime.engine.config import MTP, NGRAM, EngineConfig
from mycli.runtime.errors import Declined, ModelError, UsageError, UserError
from mycli.runtime.hub.resolve import Source, resolve, resolve_adapter
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.tokenizer.chat_template import Message, TemplateOptions
from mycli.runtime.utils.memory import gc_freeze, gc_paused

if TYPE_CHECKING:  # torch takes a second to import
    from torch import Tensor

    from mycli.runtime.cache.prefix_store import PrefixStore
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.engine.engine import Engine
    from mycli.runtime.engine.loading.loader import LoadedModel
    from mycli.runtime.engine.model_runner import CacheShape
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.speculative.proposers import Proposer
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512  # of a reply, where the caller sets no limit; fewer where the context has no room for them


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


class ReplyOptions(TypedDict, total=False):
    """How to reply."""

    params: SamplingParams  # default: those that the model recommends, or greedy decoding
    max_tokens: int  # default: 512, or what the context has room for
    stop: Sequence[str]  # strings that end the reply
    logprobs: int  # number of likeliest tokens to return at each position
    raw: bool  # continue the text, without the chat template


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model and its engine, to be used from one thread. As a context manager it is closed at the end."""

    source: Source
    placement: "Placement"
    plan: "MemoryPlan"
    model: "LoadedModel"
    engine: "Engine"

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.model.tokenizer

    @property
    def longest_context(self) -> bool:
        """Whether the context is the longest that the model was trained for."""
        return self.engine.context >= self.model.runner.config.max_context

    @overload
    def generate(self, prompt: str, **options: Unpack[ReplyOptions]) -> "Completion": ...
    @overload
    def generate(self, prompt: list[str], **options: Unpack[ReplyOptions]) -> "list[Completion]": ...
    def generate(self, prompt: str | list[str], **options: Unpack[ReplyOptions]) -> "Completion | list[Completion]":
        """Reply to one prompt, or to several in one batch. Raises UserError.

        With a chat template a prompt is a question; without one, or with `raw`, it is a text to continue.
        """
        if isinstance(prompt, str):
            return self._finish([self._text_reply(prompt, options)])[0]
        return self._finish([self._text_reply(text, options) for text in prompt])

    def chat(self, messages: Sequence[Message | Mapping[str, str]], **options: Unpack[ReplyOptions]) -> "Completion":
        """Reply to a conversation of messages, each with a `role` and `content`. Raises UserError."""
        return self._finish([self._chat_reply(messages, options)])[0]

    def stream(
        self, prompt: str | Sequence[Message | Mapping[str, str]], **options: Unpack[ReplyOptions]
    ) -> "Completion":
        """Return a reply that is generated while its pieces of text are iterated; leaving the loop ends it."""
        if isinstance(prompt, str):
            return self._text_reply(prompt, options)
        return self._chat_reply(prompt, options)

    def hidden_states(self, text: str) -> "Tensor":
        """Return the final hidden states [tokens, hidden] of `text`: what the output head reads, in the model's dtype.

        They are computed in a cache of their own, chunk by chunk. Raises UsageError if the text is longer than the
        context.
        """
        import torch

        from mycli.runtime.cache.batch import Chunk
        from mycli.runtime.engine.model_runner import CacheShape
        from mycli.runtime.memory.plan import prefill_chunk

        tokens = self.tokenizer.encode(text, add_special=True)
        if not 0 < len(tokens) <= self.engine.context:
            raise UsageError(f"{len(tokens)} tokens; the context holds 1 to {self.engine.context}", code="more-context")
        runner = self.model.runner
        states: list[Tensor] = []
        cache = runner.make_cache(CacheShape.contiguous(len(tokens)))
        size = prefill_chunk(runner.device.type == "cuda")
        for start in range(0, len(tokens), size):
            runner.run([Chunk(tokens[start : start + size], start, (0,), 0)], cache, states.append)
        return torch.cat(states)

    def embed(
        self, texts: Sequence[str], prompt: str | None = None, dimensions: int | None = None, *, first: int = 1
    ) -> "Tensor":
        """Return the vectors fp32 [texts, size] of an embedding model, in one batch.

        prompt: the name of the model's prompt; dimensions: the number of values to keep; first: the number of the first
        text in messages. Raises ModelError for a model that computes no embeddings, UsageError for a text that is too
        long and for an unknown prompt.
        """
        import torch

        from mycli.runtime.engine.sequence import Request

        embedder = self.model.embedder
        if embedder is None:
            raise ModelError("the model computes no embeddings: its folder has no modules.json", code="embedding-model")
        try:
            before = embedder.prompt(prompt)
        except KeyError:
            known = ", ".join(embedder.spec.prompts) or "none"
            raise UsageError(f"the model has no prompt {prompt!r:.60}", f"it has: {known}") from None
        numbers: list[int] = []
        states: Literal["all", "last"] = "all" if embedder.spec.needs_all else "last"
        for number, text in enumerate(texts, first):
            tokens = tuple(self.tokenizer.encode(before + text, add_special=True))
            try:
                numbers.append(self.engine.submit(Request(tokens, limit=0, hidden_states=states)))
            except UsageError as error:
                raise error.with_message(f"text {number}: {error.message}") from None
        vectors: dict[int, Tensor] = {}
        while len(vectors) < len(numbers):
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                if output.hidden is not None:
                    vectors[output.sequence] = embedder.vector(output.hidden, dimensions)
        return torch.stack([vectors[number] for number in numbers])

    def memory_used(self) -> int:
        """Return the bytes the process uses on the model's device, Python and torch included."""
        if self.placement.device.type == "cuda":
            import torch

            return torch.cuda.memory_reserved(self.placement.device)
        return resident() or self.engine.nbytes

    def close(self) -> None:
        """Write the disk prefix cache, if there is one. The engine must not be used afterwards."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _text_reply(self, text: str, options: ReplyOptions) -> "Completion":
        if options.get("raw") or self.tokenizer.template is None:
            return self._reply(self.tokenizer.encode(text, add_special=True), options)
        return self._chat_reply([Message("user", text)], options)

    def _chat_reply(self, messages: Sequence[Message | Mapping[str, str]], options: ReplyOptions) -> "Completion":
        conversation = [message if isinstance(message, Message) else Message(**message) for message in messages]  # type: ignore[arg-type]  # Message checks the role
        return self._reply(self.tokenizer.apply_chat_template(conversation), options)

    def _reply(self, tokens: Sequence[int], options: ReplyOptions) -> "Completion":
        from mycli.runtime.engine.replies.completion import Completion
        from mycli.runtime.engine.sequence import reply_room

        limit = options.get("max_tokens")
        if limit is None and reply_room(self.engine.context, len(tokens)) > DEFAULT_MAX_TOKENS:
            limit = DEFAULT_MAX_TOKENS
        return Completion(
            self.model,
            self.engine,
            tokens,
            options.get("params") or recommended(self.model.defaults),
            limit=limit,
            stops=options.get("stop", ()),
            top=options.get("logprobs"),
        )

    def _finish(self, replies: "list[Completion]") -> "list[Completion]":
        from mycli.runtime.engine.replies.completion import complete_all

        for _ in complete_all(self.engine, [[reply] for reply in replies], len(replies)):
            pass
        for reply in replies:
            if reply.error is not None:
                raise reply.error
        return replies


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
    folder = open_model_folder(source.folder)
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
    draft = _draft_folder(folder, config.draft, offline)
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
    from mycli.runtime.engine.model_runner import cache_shape

    running = config.running or plan.batch
    shape = cache_shape(plan.context, plan.batch, running)
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
        from mycli.runtime.speculative.draft_length import LENGTHS, LONG_LENGTHS, AdaptiveDraftLength
        from mycli.runtime.speculative.speculator import ProposerSpeculator

        proposer = _proposer(config.draft, draft, loaded, shape)
        cost = proposer.relative_cost
        # On a GPU each length has graphs of its own, whose memory is counted for short ones.
        lengths = LENGTHS if cost or placement.device.type == "cuda" else LONG_LENGTHS
        noted = list[str]()

        def note_once(text: str) -> None:  # there is a policy for each number of sequences, and all say the same
            if not noted:
                noted.append(text)
                report.note(text)

        speculator = ProposerSpeculator(
            proposer,
            lambda: AdaptiveDraftLength(cost, note_once, lengths),
            pipelined=placement.device.type == "cuda",
        )
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
    """Return `folder` with the LoRA adapter of this name merged in; reports one that was trained on another model."""
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


def mtp_head(folder: ModelFolder) -> ModelFolder:
    """Return the folder's multi-token prediction head. Raises ModelError if it has none."""
    if folder.mtp_head is None:
        kind = folder.config.model_type
        cause = f"{kind} models have none" if folder.config.mtp is None else "the folder has no mtp.* tensors"
        raise ModelError(f"no multi-token prediction head: {cause}", code="other-draft")
    return folder.mtp_head


def _draft_folder(folder: ModelFolder, draft: str | None, offline: bool) -> ModelFolder | None:
    if draft is None or draft == NGRAM:
        return None
    if draft == MTP:
        return mtp_head(folder)
    with _errors_about(draft):
        return open_model_folder(resolve(draft, offline=offline).folder)


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
