"""Separates control tokens spelled in a message from those that the chat template writes."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

# A pasted `<|im_end|><|im_start|>system` must reach the model as characters:
# - A conversation without such spellings is rendered and encoded in one call, as transformers does.
# - Otherwise each spelling is wrapped in two characters that occur nowhere in the conversation and so cannot be forged.
#   The rendered text is split at the template's own control tokens; segments with a wrapper are encoded without added
#   tokens, the others normally.
# - A second rendering with the spellings removed must contain the same control tokens in the same order. A template
#   that depends on a spelling, or damages the wrappers, is refused.
# Control tokens are all added tokens, also non-special ones (`<tool_call>`), except whitespace (`▁▁` too). In assistant
# messages only special ones count: a `<think>` there was a token when the model wrote it. Not covered: a token half
# written by the template and half by the text; no known template does that.


_MAX_DEPTH = 20  # of nested groups in a pattern, whose compilation is recursive


@dataclass(frozen=True)
class AddedToken:
    """A token matched before pre-tokenization; fields as in tokenizer.json."""

    id: int
    content: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a rendered conversation. plain: encode without added tokens; inside: it follows a control token."""

    text: str
    plain: bool
    inside: bool


@dataclass(frozen=True)
class Sentinels:
    start: str
    end: str

    @classmethod
    def absent_from(cls, texts: Sequence[str]) -> "Sentinels":
        """Return two private-use characters that occur in none of `texts`."""
        used = set().union(*texts)
        free = (mark for code in range(0x10FFFD, 0xE000, -1) if (mark := chr(code)) not in used)
        return cls(next(free), next(free))


def is_space(token: str) -> bool:
    """Whether a token is white space, also as SentencePiece writes it."""
    return not token.replace("▁", " ").strip()


def _alternatives(contents: Sequence[str]) -> str:
    return _longest_of(sorted(filter(None, contents))) or "(?!)"  # which never matches


def _longest_of(texts: Sequence[str], depth: int = 0) -> str:
    """Return a pattern of the sorted `texts` that matches the longest, as the tokenizer does.

    Common beginnings are written once: a search tries no text after another. Gemma 3 has 6,250 that begin with "<".
    """
    if depth == _MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})"
    branches = []
    for _, texts_of_branch in groupby(filter(None, texts), key=itemgetter(0)):
        branch = list(texts_of_branch)
        beginning = os.path.commonprefix(branch)
        branches.append(re.escape(beginning) + _longest_of([text[len(beginning) :] for text in branch], depth + 1))
    if not branches:
        return ""
    if "" in texts:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class ControlTokens:
    """Finds, wraps and separates spellings of `added` tokens; `normalize` is the tokenizer's normalizer."""

    def __init__(self, added: Sequence[AddedToken], normalize: Callable[[str], str]) -> None:
        control = [token for token in added if token.special or not is_space(token.content)]
        self.ids = frozenset(token.id for token in control)
        self._tokens = {token.content: token for token in control}
        self._alternatives = _alternatives(list(self._tokens))
        self._any = re.compile(self._alternatives)
        self._special = re.compile(_alternatives([token.content for token in control if token.special]))
        # A token with `normalized` is matched in the normalized text, where other characters may spell it.
        normalized = [token.content for token in control if token.normalized]
        self._normalize = normalize if normalized else None
        self._normalized = re.compile(_alternatives([normalize(content) for content in normalized]))

    def spelled_in(self, value: Any, special_only: bool = False) -> bool:
        return any(self._spelled(text, special_only) for text in strings(value))

    def _spelled(self, text: str, special_only: bool) -> bool:
        if (self._special if special_only else self._any).search(text):
            return True
        return self._normalize is not None and self._normalized.search(self._normalize(text)) is not None

    def wrap(self, value: Any, sentinels: Sentinels, special_only: bool = False, keep: bool = True) -> Any:
        """Return the JSON `value` with each spelling between sentinels; without `keep`, replaced by the sentinels."""
        if isinstance(value, dict):
            return {
                self.wrap(key, sentinels, special_only, keep): self.wrap(item, sentinels, special_only, keep)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.wrap(item, sentinels, special_only, keep) for item in value]
        if not isinstance(value, str) or not self._spelled(value, special_only):
            return value
        pattern = self._special if special_only else self._any
        wrapped, count = pattern.subn(lambda match: sentinels.start + (match[0] if keep else "") + sentinels.end, value)
        if count:
            return wrapped
        return sentinels.start + (value if keep else "") + sentinels.end  # only its normalized form spells a token

    def template_tokens(self, rendered: str, sentinels: Sentinels) -> list[str]:
        """Return the control tokens that the template wrote, in order."""
        return [match["token"] for match in self._scan(rendered, sentinels) if match["token"]]

    def segments(self, rendered: str, sentinels: Sentinels) -> Iterator[Segment]:
        """Split `rendered`, without sentinels, so that a segment that had one is plain and has no template token."""
        # pending: text to encode normally; text: since the last template token; plain: whether that had a sentinel.
        pending, text, plain = "", "", False
        before: AddedToken | None = None
        end = 0
        for match in self._scan(rendered, sentinels):
            text += rendered[end : match.start()]
            end = match.end()
            if not match["token"]:
                text, plain = text + match[0].replace(sentinels.start, "").replace(sentinels.end, ""), True
                continue
            token = self._tokens[match["token"]]
            if plain:
                if pending:
                    yield Segment(pending, False, False)
                yield self._plain(text, before, token)
                pending = ""
            else:
                pending += text
            pending, text, plain, before = pending + token.content, "", False, token
        text += rendered[end:]
        if not plain:
            pending, text = pending + text, ""
        if pending:
            yield Segment(pending, False, False)
        if text:
            yield self._plain(text, before, None)

    @staticmethod
    def _plain(text: str, before: AddedToken | None, after: AddedToken | None) -> Segment:
        # A token with rstrip or lstrip absorbs the whitespace next to it.
        if before and before.rstrip:
            text = text.lstrip()
        if after and after.lstrip:
            text = text.rstrip()
        return Segment(text, True, before is not None)

    def _scan(self, rendered: str, sentinels: Sentinels) -> Iterator[re.Match[str]]:
        # Spellings with at least one sentinel (a truncating template may drop the other), lone sentinels, and tokens.
        start, end, spelling = re.escape(sentinels.start), re.escape(sentinels.end), self._alternatives
        pattern = f"{start}(?:{spelling}){end}?|(?:{spelling}){end}|[{start}{end}]|(?P<token>{spelling})"
        return re.finditer(pattern, rendered)


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
