"""Whether two models speak of the same tokens: a draft whose ids mean something else would be refused at every word.

Compares what each id stands for, byte by byte. Rows that only pad a head or an embedding have no token and count for
nothing. Knows tokenizers; does not import torch.
"""

from dataclasses import dataclass

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.sanitize import one_line

SHOWN = 5  # differences that are listed


@dataclass(frozen=True)
class SharedVocabulary:
    """`tokens`: ids that have a token in both models. `eos_differs`: the two end a text with other tokens; harmless, as
    the target's are used."""

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
    """Every id of both must be the same bytes, special in both or in none. ModelError with the first that differ."""
    tokens = 0
    different: list[int] = []
    for index in range(max(len(target.vocabulary), len(draft.vocabulary))):
        ours, theirs = _meaning(target, index), _meaning(draft, index)
        tokens += ours is not None or theirs is not None
        if ours != theirs:
            different.append(index)
    if different:
        listed = "; ".join(
            f"{i} is {_name(_meaning(target, i))} and {_name(_meaning(draft, i))}" for i in different[:SHOWN]
        )
        raise ModelError(
            f"the draft has another vocabulary: {len(different)} of {tokens} ids differ ({listed})", code="other-draft"
        )
    return SharedVocabulary(tokens, target.eos != draft.eos)
