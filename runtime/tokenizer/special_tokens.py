"""Keeps control tokens that a person's text spells apart from those that the chat template writes.

A pasted `<|im_end|><|im_start|>system` must reach the model as characters. The policy:

- Text without the spelling of any added token takes the plain way: rendered as it is and encoded as one text, which is
  exactly what `transformers.apply_chat_template` does.
- Otherwise each spelling is wrapped, before rendering, in two characters that occur nowhere in the conversation (chosen
  after looking, so they cannot be forged, and nothing need be stripped). Templates may trim, split or search the text
  as usual. Afterwards the rendered text is cut at the template's own control tokens; every segment that holds a wrapper
  is encoded by a tokenizer that knows no added tokens, the rest normally.
- As a check, the conversation is rendered a second time with the spellings taken out: both must hold the same control
  tokens in the same order. A template that decides by such a spelling, or mangles the wrappers, is refused.

Counted as control tokens are all added tokens, also those not marked special (`<tool_call>`), except ordinary blanks.
In what the assistant said only special ones are: a `<think>` there was a token when the model wrote it.
Not covered: a token of which the template writes one half and the text the other; no known template does that.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AddedToken:
    """A token that the tokenizer finds in the text before anything else; fields as in tokenizer.json."""

    id: int
    content: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a rendered conversation: `plain`: no added token is recognised in it, `inside`: it follows one."""

    text: str
    plain: bool
    inside: bool


@dataclass(frozen=True)
class Sentinels:
    """The two characters around a spelling."""

    start: str
    end: str

    @classmethod
    def absent_from(cls, texts: Sequence[str]) -> "Sentinels":
        """Two private-use characters that occur in none of `texts`."""
        used = set().union(*texts)
        start, end = [mark for code in range(0x10FFFD, 0xE000, -1) if (mark := chr(code)) not in used][:2]
        return cls(start, end)


def _alternatives(contents: Sequence[str]) -> str:
    # The longest first, as the tokenizer takes the longest; (?!) never matches.
    return "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)"


class ControlText:
    """Finds, wraps and separates the spellings of `added` tokens; `normalize` is the tokenizer's normalizer."""

    def __init__(self, added: Sequence[AddedToken], normalize: Callable[[str], str]) -> None:
        control = [token for token in added if token.special or token.content.strip()]
        self.ids = frozenset(token.id for token in control)
        self._tokens = {token.content: token for token in control}
        self._alternatives = _alternatives(list(self._tokens))
        self._any = re.compile(self._alternatives)
        self._special = re.compile(_alternatives([token.content for token in control if token.special]))
        # A token with `normalized` is looked for in the normalized text, where other characters may spell it.
        hidden = [token.content for token in control if token.normalized]
        self._normalize = normalize if hidden else None
        self._hidden = re.compile(_alternatives([normalize(content) for content in hidden]))

    def spelled_in(self, value: Any, special_only: bool = False) -> bool:
        """Whether any string in the JSON `value` spells a control token."""
        return any(self._spelled(text, special_only) for text in strings(value))

    def _spelled(self, text: str, special_only: bool) -> bool:
        if (self._special if special_only else self._any).search(text):
            return True
        return self._normalize is not None and self._hidden.search(self._normalize(text)) is not None

    def wrap(self, value: Any, sentinels: Sentinels, special_only: bool = False, keep: bool = True) -> Any:
        """JSON `value` with each spelling between `sentinels`, or, without `keep`, only the sentinels in its place."""
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
        wrapped, count = pattern.subn(lambda found: sentinels.start + (found[0] if keep else "") + sentinels.end, value)
        if count:
            return wrapped
        return sentinels.start + (value if keep else "") + sentinels.end  # only its normalized form spells a token

    def written(self, rendered: str, sentinels: Sentinels) -> list[str]:
        """The control tokens that the template wrote, in order."""
        return [found["token"] for found in self._scan(rendered, sentinels) if found["token"]]

    def segments(self, rendered: str, sentinels: Sentinels) -> Iterator[Segment]:
        """`rendered` without sentinels, cut so that a segment that had one is `plain` and holds no template token."""
        pending, text, plain = "", "", False  # decided text; text since the last template token; had it any
        before: AddedToken | None = None
        end = 0
        for found in self._scan(rendered, sentinels):
            text += rendered[end : found.start()]
            end = found.end()
            if not found["token"]:
                text, plain = text + found[0].replace(sentinels.start, "").replace(sentinels.end, ""), True
                continue
            token = self._tokens[found["token"]]
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
        """A plain segment, without the blanks that the tokens around it swallow."""
        if before and before.rstrip:
            text = text.lstrip()
        if after and after.lstrip:
            text = text.rstrip()
        return Segment(text, True, before is not None)

    def _scan(self, rendered: str, sentinels: Sentinels) -> Iterator[re.Match[str]]:
        """Spellings beside a sentinel (a template that cuts texts may lose one), lone ones, and `token`s."""
        start, end, some = re.escape(sentinels.start), re.escape(sentinels.end), self._alternatives
        return re.finditer(f"{start}(?:{some}){end}?|(?:{some}){end}|[{start}{end}]|(?P<token>{some})", rendered)


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
