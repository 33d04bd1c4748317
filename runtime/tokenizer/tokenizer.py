"""A model's tokenizer: encodes text and conversations, decodes ids.

tokenizer.json and tokenizer_config.json are untrusted: every id and name is checked against the model. Control tokens
spelled in a text stay text (`special_tokens`); unusual tokenizers run in a worker process (`backend`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.tokenizer.backend import GuardedPipeline, Pipeline, is_trusted
from mycli.runtime.tokenizer.chat_template import (
    ChatTemplate,
    Message,
    TemplateOptions,
    Tool,
    special_tokens_map,
)
from mycli.runtime.tokenizer.detokenizer import Detokenizer
from mycli.runtime.tokenizer.fill_in_middle import FIM_NAMES, FimPrompt, FimTokens, fim_prompt, find_fim_tokens
from mycli.runtime.tokenizer.special_tokens import AddedToken, ControlTokens, Sentinels, strings
from mycli.runtime.tokenizer.stream import StreamDecoder
from mycli.runtime.tokenizer.tokenizer_files import (
    read_added,
    read_tokenizer,
    read_tokenizer_settings,
    read_vocabulary,
    with_embedding_rows,
)
from mycli.runtime.utils.json_fields import Fields

MAX_TEXT = 1 << 22  # characters per call; callers split longer texts


# Classes of transformers whose models get no token types, unless `model_input_names` says otherwise.
_WITHOUT_TYPES = ("Camembert", "MPNet", "Roberta", "XLMRoberta")


@dataclass(frozen=True)
class TextPair:
    """The tokens of two texts with the special tokens of a pair; types: of each token, empty if no model has any."""

    ids: tuple[int, ...]
    types: tuple[int, ...]


def _names_types(settings: Fields) -> bool:
    names = settings.values.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return not str(settings.values.get("tokenizer_class")).startswith(_WITHOUT_TYPES)


class Tokenizer:
    """The tokenizer of one model; vocabulary: token by id, None for unused rows; eos: at most one id."""

    def __init__(
        self,
        encoder: Pipeline | GuardedPipeline,
        vocabulary: Sequence[str | None],
        added: Sequence[AddedToken],
        decoder: Any,
        settings: Fields,
        template: ChatTemplate | None,
    ) -> None:
        """`settings`: of tokenizer_config.json."""
        self.vocabulary = vocabulary
        self.template = template
        self._special_tokens = special_tokens = special_tokens_map(settings)
        response_template = settings.values.get("response_template")
        self.response_template: Fields | None = None
        if isinstance(response_template, dict):
            self.response_template = Fields(response_template, "tokenizer_config.json: response_template")
        fim_names = [name for name in FIM_NAMES if isinstance(settings.values.get(name), str | dict)]
        self._fim_names = special_tokens_map(settings, fim_names)
        self._encoder = encoder
        self._control = ControlTokens(added, encoder.normalize)
        self._detokenizer = Detokenizer(vocabulary, {token.id for token in added if token.special}, decoder)
        self.bos = self._id(special_tokens.get("bos_token"))
        eos = self._id(special_tokens.get("eos_token"))
        # A control token, but also that of characters which the vocabulary lacks.
        self._unknown = self._id(special_tokens.get("unk_token"))
        self.eos: tuple[int, ...] = () if eos is None else (eos,)
        self._add_eos = settings.values.get("add_eos_token") is True
        self._has_types = _names_types(settings)

    @classmethod
    def load(cls, folder: Path, vocab_size: int, lower: bool = False) -> "Tokenizer":
        """Load the tokenizer of a model with `vocab_size` embedding rows; lower: it puts texts in lower case first.

        Raises ModelError for damaged files, ids without an embedding row, duplicate ids, unsupported decoders.
        """
        raw, data = read_tokenizer(folder)
        settings = read_tokenizer_settings(folder)
        template = ChatTemplate.load(folder, settings)

        def encoder() -> Pipeline | GuardedPipeline:
            if is_trusted(raw.values):
                return Pipeline(data, lower)
            return GuardedPipeline(folder / "tokenizer.json", lower)

        usable = with_embedding_rows(raw, settings, template, vocab_size) if is_trusted(raw.values) else raw
        if usable is not raw:
            raw, data = usable, json.dumps(usable.values, ensure_ascii=False).encode()
        return cls._checked(raw, encoder, settings, template, vocab_size)

    @classmethod
    def from_fields(cls, raw: Fields, settings: Fields, vocab_size: int) -> "Tokenizer":
        """Create a tokenizer from a parsed tokenizer.json and tokenizer_config.json.

        Raises ModelError as `load` does, and for a tokenizer that needs a worker process.
        """
        if not is_trusted(raw.values):
            raise ModelError(
                f"{raw.source}: the tokenizer has unsupported parts", "use the repository with safetensors files"
            )

        def encoder() -> Pipeline:
            return Pipeline(json.dumps(raw.values, ensure_ascii=False).encode())

        return cls._checked(raw, encoder, settings, ChatTemplate.from_settings(settings), vocab_size)

    @classmethod
    def _checked(
        cls,
        raw: Fields,
        make_encoder: Callable[[], Pipeline | GuardedPipeline],
        settings: Fields,
        template: ChatTemplate | None,
        vocab_size: int,
    ) -> "Tokenizer":
        vocabulary = read_vocabulary(raw, vocab_size)
        added = read_added(raw, vocabulary)
        encoder = make_encoder()
        for token, index in zip(added, encoder.token_ids([token.content for token in added]), strict=True):
            if index != token.id:
                problem = f"gives {token.content!r:.60} id {token.id}, but the library assigns {index}"
                raise raw.fail("added_tokens", problem)
        return cls(encoder, vocabulary, added, raw.values.get("decoder"), settings, template)

    def use_template(self, options: TemplateOptions) -> None:
        """Render conversations as `options` says. Raises UsageError if the model has no such template."""
        if options == TemplateOptions():
            return
        if self.template is not None:
            self.template = self.template.with_options(options)
        elif options.source is not None or options.name is not None:
            self.template = ChatTemplate({}, self._special_tokens).with_options(options)
        else:
            raise UsageError("the model has no chat template that takes arguments", code="add-template")

    def _id(self, token: str | None) -> int | None:
        return self.vocabulary.index(token) if token is not None and token in self.vocabulary else None

    @cached_property
    def missing_eos(self) -> tuple[int, ...]:
        """The end token after a text to embed, if `add_eos_token` asks for it and tokenizer.json adds none."""
        # transformers 4 followed tokenizer_config.json here, transformers 5 follows tokenizer.json. E5-Mistral and
        # gte-Qwen2 pool the end token, so that without it their vectors are those of the last token of the content.
        if not self._add_eos or self.encode("a", add_special=True)[-1:] != self.encode("a", add_special=False)[-1:]:
            return ()
        return self.eos

    def encode(self, text: str, *, add_special: bool, allow_special: bool = False) -> list[int]:
        """Return the ids of `text`. add_special: add the tokenizer's special tokens, usually bos.

        Control tokens spelled in the text are encoded as characters unless `allow_special`. Raises UsageError for a
        text that is too long or not Unicode, ModelError if the tokenizer fails.
        """
        _check_texts([text])
        if allow_special or not self._control.spelled_in(text):
            return self._in_vocabulary(self._encoder.encode(text, add_special, plain=False, inside=False))
        ids = self._encode_plain(text, inside=False)
        return self._in_vocabulary(self._encoder.encode(text, True, plain=True, inside=False)) if add_special else ids

    def _in_vocabulary(self, ids: list[int]) -> list[int]:
        # Ids that a post-processor adds are not checked elsewhere: a model would look them up beyond its embedding.
        if max(ids, default=0) >= len(self.vocabulary):
            problem = f"post_processor adds token {max(ids)}, beyond the vocabulary of {len(self.vocabulary)}"
            raise ModelError(f"tokenizer.json: {problem}", "the file may be damaged")
        return ids

    def encode_pair(self, first: str, second: str, longest: int | None = None) -> TextPair:
        """Return two texts as the tokenizer joins them for a reranker; control tokens spelled in them stay text.

        longest: cut the longer text, then both, to this number of tokens in all. Raises as `encode`.
        """
        _check_texts([first, second])
        plain = self._control.spelled_in([first, second])
        if plain:
            for text in (first, second):
                self._encode_plain(text, inside=False)  # checks it
        ids, types = self._encoder.encode_pair(first, second, plain, longest)
        return TextPair(tuple(self._in_vocabulary(ids)), tuple(types) if self._has_types and any(types) else ())

    def beginning(self, text: str, tokens: int) -> str:
        """Return the longest beginning of `text` that has at most `tokens` tokens. Raises as `encode`."""
        _check_texts([text])
        return self._encoder.beginning(text, tokens, self._control.spelled_in(text))

    @cached_property
    def fim_tokens(self) -> FimTokens | None:
        return find_fim_tokens(self.vocabulary, self._fim_names)

    def fim_prompt(
        self, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = (), room: int | None = None
    ) -> FimPrompt:
        """Return the prompt of `fill_in_middle`; control tokens spelled in the texts stay text. Raises UsageError."""
        if self.fim_tokens is None:
            raise UsageError("the tokenizer has no fill-in-the-middle tokens", "use a model for code completion")
        _check_texts([prefix, suffix, *strings([list(pair) for pair in extra])])
        start = [self.bos] if self.bos is not None and self.bos in self.encode("", add_special=True) else []
        return fim_prompt(self.fim_tokens, self._encode_part, start, prefix, suffix, extra, room)

    @cached_property
    def _prefix_space(self) -> bool:
        return self._encode_plain("a", inside=True) != self._encode_plain("a", inside=False)

    def _encode_part(self, text: str, inside: bool) -> list[int]:
        # Only SentencePiece's prefix space depends on the place, so other tokenizers keep added tokens of white space.
        if (inside and self._prefix_space) or self._control.spelled_in(text):
            return self._encode_plain(text, inside)
        return self._encoder.encode(text, False, plain=False, inside=False)

    def _encode_plain(self, text: str, inside: bool) -> list[int]:
        ids = self._encoder.encode(text, False, plain=True, inside=inside)
        if not self._control.ids.isdisjoint(index for index in ids if index != self._unknown):
            raise ModelError("tokenizer.json: plain characters are encoded as control tokens", code="allow-special")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; invalid UTF-8 becomes U+FFFD (see StreamDecoder)."""
        stream = StreamDecoder(self)
        return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of all added tokens except whitespace."""
        return self._control.ids

    @property
    def strip_spaces(self) -> int:
        return self._detokenizer.strip_spaces

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Return the bytes of a token, None for one without text. first: no token with text came before."""
        return self._detokenizer.piece(token_id, first)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token by itself: maybe part of a character; for a control token, its spelling."""
        piece = self.piece(token_id, first=False)
        return (self.vocabulary[token_id] or "").encode() if piece is None else piece

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with control tokens spelled out; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        allow_special: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Return the ids of a conversation rendered by the chat template; no bos is added to the template's.

        arguments: passed to the template (`ChatTemplate.check_arguments`). Control tokens spelled in messages, tools
        or arguments stay text unless `allow_special`. Raises UsageError if the template refuses the conversation,
        ModelError for a missing or failing template.
        """
        template = self._checked_template(messages, tools, arguments)
        spelled = not allow_special and (
            self._control.spelled_in([tools, arguments])
            or any(self._control.spelled_in(m.fields(), m.role == "assistant") for m in messages)
        )
        if not spelled:
            text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments)
            _check_texts([text])
            return self._encoder.encode(text, False, plain=False, inside=False)
        contents = [message.fields() for message in messages]
        sentinels = Sentinels.absent_from([*strings([contents, tools, arguments]), template.source(bool(tools))])
        wrap = partial(self._control.wrap, sentinels=sentinels)
        both = (True, False)  # with the spellings, and with them removed
        conversations = [
            [{"role": m.role, **wrap(m.fields(), special_only=m.role == "assistant", keep=keep)} for m in messages]
            for keep in both
        ]
        tool_lists = None if tools is None else [wrap(tools, keep=keep) for keep in both]
        argument_lists = [wrap(arguments, keep=keep) for keep in both]
        rendered, stripped = template.render(conversations, tool_lists, argument_lists, add_generation_prompt)
        _check_texts([rendered])
        if self._control.template_tokens(rendered, sentinels) != self._control.template_tokens(stripped, sentinels):
            raise UsageError("the chat template depends on a control token spelled in a message", code="allow-special")
        ids: list[int] = []
        for segment in self._control.segments(rendered, sentinels):
            if segment.plain:
                ids += self._encode_plain(segment.text, segment.inside)
            else:
                ids += self._encoder.encode(segment.text, False, plain=False, inside=False)
        return ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """Return the text of a conversation, for display; models get the ids of `apply_chat_template`."""
        template = self._checked_template(messages, tools, arguments)
        conversation = [{"role": message.role, **message.fields()} for message in messages]
        tool_lists = None if tools is None else [tools]
        return template.render([conversation], tool_lists, [arguments], add_generation_prompt)[0]

    def _checked_template(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, arguments: Mapping[str, Any]
    ) -> ChatTemplate:
        if self.template is None:
            raise ModelError(
                "the model has no chat_template.jinja, and no chat_template in tokenizer_config.json",
                code="continue-text",
            )
        if not messages:
            raise UsageError("a conversation needs at least one message", "write a message first")
        self.template.check_arguments(arguments)
        _check_texts(list(strings([[message.fields() for message in messages], tools, arguments])))
        return self.template


def _check_texts(texts: Sequence[str]) -> None:
    total = sum(len(text) for text in texts)
    if total > MAX_TEXT:
        raise UsageError(f"a text of {total} characters; at most {MAX_TEXT} are allowed", "shorten it")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"a text is not valid UTF-8 at character {error.start}", "convert it to UTF-8") from None
