"""Finds the fill-in-the-middle (FIM) tokens of a vocabulary, and builds the prompt between a prefix and a suffix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# The marks of prefix, suffix and middle; the first set that a vocabulary has whole counts.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code, StableCode, CodeQwen1.5
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral: the reply follows the prefix
)
# The suffix comes first, as in mistral-common and on the model card of Seed-Coder.
_SUFFIX_FIRST = ("[SUFFIX]", "<[fim-suffix]>")
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
_REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>", "<|reponame|>", "<fim-repo>", "<REPO>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>", "<|filename|>")
# Ends of the base model, which an instruct model with another end of turn still writes after a middle.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "▁<EOT>", "<EOT>")
_KNOWN = frozenset((*(mark for marks in _MARKS for mark in marks if mark), *_PADS, *_REPOSITORIES, *_FILES, *_ENDS))
# Names in tokenizer_config.json: the first three are those of transformers' Code Llama; a GGUF file has ids for all.
FIM_NAMES = ("prefix_token", "suffix_token", "middle_token", "fim_pad_token", "fim_repo_token", "fim_file_token")
# As llama.cpp: its server writes these where a model has no name for a file or repository.
_REPOSITORY, _FILE, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class FimTokens:
    """The FIM token ids of a model. middle: None for a reply that follows the prefix; ends: end the middle."""

    prefix: int
    suffix: int
    middle: int | None
    pad: int | None
    repository: int | None
    file: int | None
    ends: frozenset[int]
    suffix_first: bool


@dataclass(frozen=True)
class FimPrompt:
    """The token ids of a prompt; cut: parts of the text that is furthest from the gap were left out."""

    ids: list[int]
    cut: bool


def find_fim_tokens(vocabulary: Sequence[str | None], names: Mapping[str, str]) -> FimTokens | None:
    """Return the FIM tokens of a vocabulary, None without them; `names`: tokens by `FIM_NAMES`, before known ones."""
    searched = _KNOWN | set(names.values())
    ids = {token: index for index, token in enumerate(vocabulary) if token is not None and token in searched}
    named = tuple(names.get(name, "") for name in FIM_NAMES[:3])
    for prefix, suffix, middle in (named, *_MARKS):
        if prefix in ids and suffix in ids and (middle in ids or (not middle and suffix in _SUFFIX_FIRST)):
            break
    else:
        return None

    def first(name: str, known: Sequence[str]) -> int | None:
        return next((ids[token] for token in (names.get(name, ""), *known) if token in ids), None)

    pad, repository, file = (
        first(name, known) for name, known in zip(FIM_NAMES[3:], (_PADS, _REPOSITORIES, _FILES), strict=True)
    )
    marks = (ids[prefix], ids[suffix], ids.get(middle))
    ends = (*marks, pad, repository, file, *map(ids.get, _ENDS))
    known_ends = frozenset(end for end in ends if end is not None)
    return FimTokens(*marks, pad, repository, file, known_ends, suffix in _SUFFIX_FIRST)


def fim_prompt(
    tokens: FimTokens,
    encode: Callable[[str, bool], list[int]],
    start: Sequence[int],
    prefix: str,
    suffix: str,
    extra: Sequence[tuple[str, str]] = (),
    room: int | None = None,
) -> FimPrompt:
    """Return the prompt for the text between `prefix` and `suffix`.

    encode(text, inside): ids of plain text, inside: after a control token; start: ids that begin every prompt; extra:
    names and texts of other files; room: most ids, None for any number. Of too much text the part nearest to the gap
    stays: 3/4 of the room are the prefix, as in llama.cpp, and `extra` gets what both leave.
    """
    # SentencePiece's space before a text is part of the prefix only, as in Meta's and Mistral's own code.
    before, after, context = encode(prefix, False), encode(suffix, True), _extra_ids(tokens, encode, extra)
    length = len(before) + len(after) + len(context)
    if room is not None:
        room = max(room - len(start) - 3, 0)
        most_after = max(room - len(before), room // 4)
        after = after[:most_after]
        before = _last(before, room - len(after))
        context = _last(context, room - len(before) - len(after))
    cut = len(before) + len(after) + len(context) < length
    marked = ([tokens.prefix, *before], [tokens.suffix, *after])
    first, second = reversed(marked) if tokens.suffix_first else marked
    middle = [] if tokens.middle is None else [tokens.middle]
    return FimPrompt([*start, *context, *first, *second, *middle], cut)


def _last(ids: list[int], count: int) -> list[int]:
    return ids[max(len(ids) - count, 0) :]


def _extra_ids(
    tokens: FimTokens, encode: Callable[[str, bool], list[int]], extra: Sequence[tuple[str, str]]
) -> list[int]:
    if not extra:
        return []
    ids: list[int] = []
    if tokens.repository is not None:
        ids += [tokens.repository, *encode(_REPOSITORY, True)]
    for name, text in extra:
        if tokens.file is None:
            ids += encode(_SNIPPET + text, True)
        else:
            ids += [tokens.file, *encode(f"{name}\n{text}", True)]
    if tokens.file is not None:
        ids += [tokens.file, *encode(_FILE, True)]
    return ids
