"""A model that is open: replies, conversations, hidden states and embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack, overload

from mycli.runtime.device.system import resident
from mycli.runtime.engine.sequence import Request, reply_room
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.stream import TextRules

if TYPE_CHECKING:  # torch takes a second to import
    from torch import Tensor

    from mycli.runtime.device.placement import Placement
    from mycli.runtime.engine.engine import Engine
    from mycli.runtime.engine.loading.loader import LoadedModel
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.embedder import Embedder
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512  # of a reply, where the caller sets no limit; fewer where the context has no room for them


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
        tokens = self.tokenizer.encode(text, add_special=True)
        if not 0 < len(tokens) <= self.engine.context:
            raise UsageError(f"{len(tokens)} tokens; the context holds 1 to {self.engine.context}", code="more-context")
        return self.model.runner.hidden_states(tokens)

    def embed(
        self, texts: Sequence[str], prompt: str | None = None, dimensions: int | None = None, *, first: int = 1
    ) -> "Tensor":
        """Return the vectors fp32 [texts, size] of an embedding model, in one batch.

        prompt: the name of the model's prompt; dimensions: the number of values to keep; first: the number of the first
        text in messages. Raises ModelError for a model that computes no embeddings, UsageError for a text that is too
        long, an unknown prompt, and more dimensions than there are.
        """
        import torch

        embedder, before = self._embedder(prompt, dimensions)
        numbers: list[int] = []
        vectors: dict[int, Tensor] = {}
        states: Literal["all", "last"] = "all" if embedder.spec.needs_all else "last"
        longest = embedder.spec.longest(self.engine.context)
        try:
            for number, text in enumerate(texts, first):
                tokens = (*self.tokenizer.encode(before + text, add_special=True), *self.tokenizer.missing_eos)
                if self.engine.context >= len(tokens) > longest:  # the engine refuses texts beyond its context
                    cause = f"text {number}: {len(tokens)} tokens; the model embeds at most {longest}"
                    raise UsageError(cause, "shorten the text")
                try:
                    numbers.append(self.engine.submit(Request(tokens, limit=0, hidden_states=states)))
                except UsageError as error:
                    raise error.with_message(f"text {number}: {error.message}") from None
            while len(vectors) < len(numbers):
                for output in self.engine.step():
                    if output.error is not None:
                        raise output.error
                    if output.hidden is not None:
                        vectors[output.sequence] = embedder.vector(output.hidden, dimensions)
        finally:
            for number in numbers:
                self.engine.cancel(number)
        return torch.stack([vectors[number] for number in numbers])

    def _embedder(self, prompt: str | None, dimensions: int | None) -> "tuple[Embedder, str]":
        """Return the embedder, which can return vectors of `dimensions`, and the text of `prompt`."""
        embedder = self.model.embedder
        if self.model.cross_encoder is not None:
            raise ModelError("the model computes no embeddings: it scores pairs of texts", code="reranker")
        if embedder is None:
            raise ModelError("the model computes no embeddings: its folder has no modules.json", code="embedding-model")
        try:
            before = embedder.prompt(prompt)
        except KeyError:
            known = ", ".join(embedder.spec.prompts) or "none"
            raise UsageError(f"the model has no prompt {prompt!r:.60}", f"it has: {known}") from None
        if dimensions is not None and dimensions > embedder.size:
            raise UsageError(f"{dimensions} dimensions: the vectors of this model have {embedder.size} values")
        return embedder, before

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
            tokens = self.tokenizer.encode(text, add_special=True)
            return self._reply(tokens, options, before=tokens)
        return self._chat_reply([Message("user", text)], options)

    def _chat_reply(self, messages: Sequence[Message | Mapping[str, str]], options: ReplyOptions) -> "Completion":
        conversation = [message if isinstance(message, Message) else Message(**message) for message in messages]  # type: ignore[arg-type]  # Message checks the role
        return self._reply(self.tokenizer.apply_chat_template(conversation), options)

    def _reply(self, tokens: Sequence[int], options: ReplyOptions, before: Sequence[int] = ()) -> "Completion":
        from mycli.runtime.engine.replies.completion import Completion
        from mycli.runtime.engine.replies.reader import ReplyReader

        limit = options.get("max_tokens")
        if limit is None and reply_room(self.engine.context, len(tokens)) > DEFAULT_MAX_TOKENS:
            limit = DEFAULT_MAX_TOKENS
        request = Request(
            tuple(tokens),
            options.get("params") or recommended(self.model.defaults),
            limit,
            self.model.stop_ids,
            logprobs=options.get("logprobs"),
        )
        reader = ReplyReader(self.tokenizer, TextRules(options.get("stop", ())), before=before)
        return Completion(self.engine, request, reader)

    def _finish(self, replies: "list[Completion]") -> "list[Completion]":
        from mycli.runtime.engine.replies.completion import finish_replies

        finish_replies(self.engine, [[reply] for reply in replies])
        return replies
