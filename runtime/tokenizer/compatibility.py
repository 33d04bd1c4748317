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
class Difference:
    """An id that is not the same token, with what it is in each model, for a person."""

    id: int
    target: str
    draft: str


@dataclass(frozen=True)
class VocabularyComparison:
    """`tokens`: ids that have a token in either model; `differences`: the first of `different` that disagree.

    `rows`: embedding rows of target and draft, which may be padded differently. `ends_differ`: the two end a text with
    other tokens; harmless, as the target's are used.
    """

    tokens: int
    rows: tuple[int, int]
    different: int
    differences: tuple[Difference, ...]
    ends_differ: bool


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


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyComparison:
    """Every id of both: the same bytes, and special in both or in none."""
    tokens = different = 0
    differences: list[Difference] = []
    for index in range(max(len(target.vocabulary), len(draft.vocabulary))):
        ours, theirs = _meaning(target, index), _meaning(draft, index)
        tokens += ours is not None or theirs is not None
        if ours != theirs:
            different += 1
            if len(differences) < SHOWN:
                differences.append(Difference(index, _name(ours), _name(theirs)))
    rows = (len(target.vocabulary), len(draft.vocabulary))
    return VocabularyComparison(tokens, rows, different, tuple(differences), target.eos != draft.eos)


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyComparison:
    """`compare_vocabularies`, and ModelError with the first differing ids unless all agree."""
    found = compare_vocabularies(target, draft)
    if found.different:
        listed = "; ".join(f"{one.id} is {one.target} and {one.draft}" for one in found.differences)
        raise ModelError(
            f"the draft has another vocabulary: {found.different} of {found.tokens} ids differ ({listed})",
            code="other-draft",
        )
    return found
