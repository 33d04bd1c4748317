"""Compares the vocabularies of a target and a draft model: with different ids, every draft token would be rejected.

Ids are compared by their bytes. Padding rows of an embedding have no token and are ignored.
"""

from dataclasses import dataclass

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.sanitize import one_line

MAX_LISTED = 5  # differences in the message


@dataclass(frozen=True)
class SharedVocabulary:
    """The result of `check_vocabularies`. tokens: ids in use. eos_differs: harmless, as the target's eos is used."""

    tokens: int
    eos_differs: bool


def _meaning(tokenizer: Tokenizer, index: int) -> tuple[str, bytes] | None:
    token = tokenizer.vocabulary[index] if index < len(tokenizer.vocabulary) else None
    if token is None:
        return None
    piece = tokenizer.piece(index, first=False)
    return ("special", token.encode()) if piece is None else ("text", piece)


def _name(meaning: tuple[str, bytes] | None) -> str:
    if meaning is None:
        return "no token"
    kind, content = meaning
    text = one_line(ascii(content.decode("utf-8", "backslashreplace")), 40)
    return text if kind == "text" else f"special {text}"


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> SharedVocabulary:
    """Raise ModelError, with the first differences, unless each id has the same bytes and kind in both models."""
    tokens = 0
    different: list[int] = []
    for index in range(max(len(target.vocabulary), len(draft.vocabulary))):
        ours, theirs = _meaning(target, index), _meaning(draft, index)
        tokens += ours is not None or theirs is not None
        if ours != theirs:
            different.append(index)
    if different:
        listed = "; ".join(
            f"{i} is {_name(_meaning(target, i))} and {_name(_meaning(draft, i))}" for i in different[:MAX_LISTED]
        )
        raise ModelError(
            f"the draft model has another vocabulary: {len(different)} of {tokens} ids differ ({listed})",
            code="other-draft",
        )
    return SharedVocabulary(tokens, target.eos != draft.eos)
