"""Encoding with the `tokenizers` library, in this process or, for an unusual tokenizer.json, in a worker process.

A tokenizer.json is untrusted: chained Replace steps can double the text each, a regular expression can backtrack
for years, and the library cannot be interrupted. A tokenizer built only from bounded parts (`is_trusted`) runs
here; any other runs in a worker with a deadline and a memory limit, with the same results.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import normalizers

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.charsmap import is_sound
from mycli.runtime.tokenizer.split_patterns import KNOWN_PATTERNS
from mycli.runtime.utils.sandbox import WorkerError, WorkerProcess

ENCODE_SECONDS = 10.0  # plus 1 s per 100,000 characters
LOAD_SECONDS = 20.0
WORKER_MEMORY = 4 << 30
MAX_STEPS = 16  # in a sequence of normalizers, pre-tokenizers or post-processors

# Characters above which a text is encoded as a batch of one: `encode` holds the GIL, 4 s for 4 million characters.
LONG_TEXT = 1 << 14

_T = TypeVar("_T")
_MODELS = ("BPE", "Unigram")
_MAX_WORD = 1000  # characters of a word that WordPiece splits, which takes the square of their number
_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "ByteLevel", "BertNormalizer")
)
_PRE_TOKENIZERS = frozenset(
    (
        *("BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"),
        "UnicodeScripts",
    )
)


_FAILS = "tokenizer.json: the tokenizer fails: "


def _problem(error: BaseException) -> ModelError:
    # The worker process has already put the prefix before the library's message.
    return ModelError(f"{_FAILS}{str(error).removeprefix(_FAILS):.300}", code="verify-files")


class Pipeline:
    """The library's tokenizer in two variants that share one model: with and without the added tokens.

    lower: put texts in lower case first.
    """

    def __init__(self, data: bytes, lower: bool = False) -> None:
        self._whole = _call(lambda: tokenizers.Tokenizer.from_buffer(data))
        if lower:
            self._whole.normalizer = _lowered(self._whole.normalizer)
        self._whole.no_truncation()  # a limit in the file would truncate prompts silently
        self._whole.no_padding()
        self._plain = tokenizers.Tokenizer(self._whole.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            value: Any = getattr(self._whole, part)
            if value is not None:
                setattr(self._plain, part, value)
        self._anchor = f"\U0010fffd{secrets.token_hex(8)}\U0010fffd"  # occurs in no text; stands for a control token
        self._plain.add_special_tokens([tokenizers.AddedToken(self._anchor, special=True, normalized=False)])

    def encode(self, text: str, add_special: bool, plain: bool, inside: bool) -> list[int]:
        """Return the ids of `text`. plain: without added tokens. inside: after a control token. Raises ModelError."""
        tokenizer = self._plain if plain else self._whole
        # Text inside a conversation gets no SentencePiece prefix space: it is encoded behind an anchor token.
        if not (plain and inside):
            if len(text) > LONG_TEXT:
                return _call(lambda: tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
            return _call(lambda: list(tokenizer.encode(text, add_special_tokens=add_special).ids))
        text = self._anchor + text
        if len(text) > LONG_TEXT:
            return _call(lambda: tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)[1:]
        return _call(lambda: list(tokenizer.encode(text, add_special_tokens=False).ids))[1:]

    def encode_pair(
        self, first: str, second: str, plain: bool, longest: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids and types of the tokens of two texts, with the special tokens of a pair. Raises ModelError.

        longest: cut the longer text, then both, to this number of tokens in all; the special tokens stay.
        """
        tokenizer = self._plain if plain else self._whole
        encoding = _call(lambda: tokenizer.encode_batch([(first, second)])[0])
        ids, types = list(encoding.ids), list(encoding.type_ids)
        if longest is None or len(ids) <= longest:
            return ids, types
        places = _longest_first(encoding.sequence_ids, longest)
        return [ids[place] for place in places], [types[place] for place in places]

    def beginning(self, text: str, tokens: int, plain: bool) -> str:
        """Return the longest beginning of `text` that has at most `tokens` tokens. Raises ModelError."""
        tokenizer = self._plain if plain else self._whole
        while text:
            offsets = _call(lambda: tokenizer.encode(text, add_special_tokens=False).offsets)  # noqa: B023
            if len(offsets) <= tokens:
                break
            # Several tokens may be of one character, and the beginning may have other tokens on its own.
            end = offsets[tokens - 1][1] if tokens else 0
            text = text[: min(end, len(text) - 1)]
        return text

    def normalize(self, text: str) -> str:
        normalizer: Any = self._whole.normalizer
        return text if normalizer is None else _call(lambda: str(normalizer.normalize_str(text)))

    def token_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self._whole.token_to_id(token) for token in tokens]


def _longest_first(texts: Sequence[int | None], longest: int) -> list[int]:
    # The places of the tokens that the library's truncation of this name leaves; texts: 0 or 1 for each token, None for
    # special ones.
    short, long = sorted((0, 1), key=texts.count)
    room = max(longest - texts.count(None), 0)
    counts = {short: texts.count(short), long: room - texts.count(short)}
    if counts[long] < counts[short]:
        counts = {short: room // 2, long: room - room // 2}
    places = []
    for place, text in enumerate(texts):
        if text is not None:
            counts[text] -= 1
        if text is None or counts[text] >= 0:
            places.append(place)
    return places


def _lowered(normalizer: Any) -> Any:
    # As sentence-transformers does: before all other steps, unless they include it.
    steps = [] if normalizer is None else [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[index] for index in range(len(normalizer))]
    if any(isinstance(step, normalizers.Lowercase) for step in steps):
        return normalizer
    return normalizers.Sequence([normalizers.Lowercase(), *steps])


def _call(work: Callable[[], _T]) -> _T:
    # The library's panics derive from BaseException, not Exception, as do the exceptions of signals.
    try:
        return work()
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise _problem(error) from None


class GuardedPipeline:
    """A `Pipeline` in a worker process, killed when it exceeds its time or memory."""

    def __init__(self, path: Path, lower: bool = False) -> None:
        argument = json.dumps([str(path.resolve()), lower])
        self._worker = WorkerProcess("mycli.runtime.tokenizer.backend", argument, WORKER_MEMORY, reply_bytes=1 << 28)

    def encode(self, text: str, add_special: bool, plain: bool, inside: bool) -> list[int]:
        ids: list[int] = self._call(["encode", text, add_special, plain, inside], _seconds(text))
        return ids

    def encode_pair(
        self, first: str, second: str, plain: bool, longest: int | None = None
    ) -> tuple[list[int], list[int]]:
        ids, types = self._call(["encode_pair", first, second, plain, longest], _seconds(first + second))
        return ids, types

    def beginning(self, text: str, tokens: int, plain: bool) -> str:
        return str(self._call(["beginning", text, tokens, plain], _seconds(text)))

    def normalize(self, text: str) -> str:
        return str(self._call(["normalize", text], _seconds(text)))

    def token_ids(self, tokens: Sequence[str]) -> list[int | None]:
        ids: list[int | None] = self._call(["token_ids", list(tokens)], LOAD_SECONDS)
        return ids

    def _call(self, request: list[object], seconds: float) -> Any:
        try:
            return self._worker.call(request, seconds)
        except WorkerError as error:
            raise _problem(error) from None


def _seconds(text: str) -> float:
    return ENCODE_SECONDS + len(text) / 100_000


def handler(argument: str) -> Callable[[Any], Any]:
    """Return the worker's handler of requests [method of `Pipeline`, arguments...]; argument: [path, lower] as JSON."""
    path, lower = json.loads(argument)
    pipeline = Pipeline(Path(path).read_bytes(), lower)
    methods: dict[str, Callable[..., Any]]
    methods = {
        "encode": pipeline.encode,
        "encode_pair": pipeline.encode_pair,
        "beginning": pipeline.beginning,
        "normalize": pipeline.normalize,
        "token_ids": pipeline.token_ids,
    }
    return lambda request: methods[request[0]](*request[1:])


def _steps(part: Any, key: str) -> list[Any]:
    # The elements of a nested Sequence, or [part] for a single step.
    if part is None:
        return []
    if isinstance(part, dict) and part.get("type") == "Sequence" and isinstance(part.get(key), list):
        return [step for child in part[key] for step in _steps(child, key)]
    return [part]


def _trusted_normalizer(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Prepend":
        return len(str(step.get("prepend"))) <= 8
    if step.get("type") == "Replace":
        pattern = step.get("pattern")
        source = pattern.get("String") if isinstance(pattern, dict) else None
        # A replacement no longer than its pattern cannot make the text grow, however many are chained.
        return isinstance(source, str) and 0 < len(source) >= len(str(step.get("content")))
    if step.get("type") == "Precompiled":
        return is_sound(step.get("precompiled_charsmap"))
    return step.get("type") in _NORMALIZERS


def _trusted_pre_tokenizer(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Split":
        pattern = step.get("pattern")
        if not isinstance(pattern, dict):
            return False
        return bool(pattern.get("String")) or pattern.get("Regex") in KNOWN_PATTERNS
    return step.get("type") in _PRE_TOKENIZERS


def _trusted_post_processor(step: Mapping[str, Any]) -> bool:
    if step.get("type") != "TemplateProcessing":
        return step.get("type") == "ByteLevel"
    defined, lists = step.get("special_tokens"), [step.get(name) for name in ("single", "pair") if name in step]
    pieces = [piece for part in lists if isinstance(part, list) for piece in part]
    if not isinstance(defined, dict) or "single" not in step or not all(isinstance(part, list) for part in lists):
        return False
    # A piece that special_tokens does not define makes the library panic at the first encoding.
    names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece, dict) and "SpecialToken" in piece]
    return len(pieces) <= 2 * MAX_STEPS and all(name in defined and _is_short(defined[name]) for name in names)


def _is_short(special_token: Any) -> bool:
    ids = special_token.get("ids") if isinstance(special_token, dict) else None
    return isinstance(ids, list) and len(ids) <= MAX_STEPS


def _trusted_model(model: Any) -> bool:
    if isinstance(model, dict) and model.get("type") == "WordPiece":
        prefix, longest = model.get("continuing_subword_prefix"), model.get("max_input_chars_per_word")
        return isinstance(prefix, str) and len(prefix) <= 8 and type(longest) is int and longest <= _MAX_WORD
    # The library slices merges by the length of the prefix, and panics with a text on the terminal if one is shorter.
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    return (
        isinstance(model, dict) and model.get("type", "BPE") in _MODELS and not any(model.get(key) for key in affixes)
    )


def is_trusted(values: Mapping[str, Any]) -> bool:
    """Return whether a parsed tokenizer.json has only parts whose time and output are bounded."""
    if not _trusted_model(values.get("model", {})):
        return False
    for key, inner, trusted in (
        ("normalizer", "normalizers", _trusted_normalizer),
        ("pre_tokenizer", "pretokenizers", _trusted_pre_tokenizer),
        ("post_processor", "processors", _trusted_post_processor),
    ):
        steps = _steps(values.get(key), inner)
        if len(steps) > MAX_STEPS or not all(isinstance(step, dict) and trusted(step) for step in steps):
            return False
    return True
