"""Checks the tokens of a rendered conversation: its start, the end of a reply, markers, and forged turns."""

import re
from collections.abc import Iterator

from mycli.runtime.errors import UserError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.template_check.finding import Finding
from mycli.runtime.tokenizer.template_check.probe import (
    FUNCTION,
    PLANTED_ANSWERS,
    PLANTED_QUESTIONS,
    Probe,
    assistant,
    calling,
    user,
)
from mycli.runtime.tokenizer.tokenizer import Tokenizer

# The styles in which templates write markers that are usually one token.
_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<(?:start|end)_of_turn>|\[/?[A-Z][A-Z_]{2,30}\]")


def check_tokens(probe: Probe) -> Iterator[Finding]:
    """Check the tokens of a model's own conversations; nothing for a template without a tokenizer."""
    tokenizer = probe.tokenizer
    if tokenizer is None:
        return
    whole = probe.text([user(0), assistant(0), user(1)], more=True)
    ids = tokenizer.encode(whole, add_special=False, allow_special=True)
    yield from _check_start(tokenizer, ids)
    yield from _check_end(probe, tokenizer)
    control = {tokenizer.vocabulary[index] or "" for index in tokenizer.control_ids}
    texts = [whole]
    if probe.has_tools:
        texts.append(probe.text([user(0)], more=True, tools=True))
    markers = dict.fromkeys(marker for text in texts for marker in _MARKER.findall(text))
    yield from (Finding("marker-not-a-token", {"marker": marker}) for marker in markers if marker not in control)
    between = whole[whole.index(PLANTED_QUESTIONS[0]) + len(PLANTED_QUESTIONS[0]) : whole.index(PLANTED_ANSWERS[0])]
    frames = [token for token in control if token and token in between]
    if not frames:
        yield Finding("turns-can-be-forged", {"opening": between})
    for token in sorted(frames):
        try:
            tokenizer.apply_chat_template([Message("user", f"a {token} b")], **probe.arguments)
        except UserError:
            yield Finding("spelled-token-refused", {"token": token})


def _check_start(tokenizer: Tokenizer, ids: list[int]) -> Iterator[Finding]:
    bos = tokenizer.bos
    if bos is None:
        return
    if ids[:2] == [bos, bos]:
        yield Finding("bos-twice", {"token": tokenizer.vocabulary[bos]})
    elif ids[:1] != [bos] and tokenizer.encode("a", add_special=True)[:1] == [bos]:
        yield Finding("bos-missing", {"token": tokenizer.vocabulary[bos]})


def _check_end(probe: Probe, tokenizer: Tokenizer) -> Iterator[Finding]:
    whole = probe.text([user(0), assistant(0)])
    after = whole[whole.rindex(PLANTED_ANSWERS[0]) + len(PLANTED_ANSWERS[0]) :]
    if not _ends(probe, tokenizer, after):
        yield Finding("turn-not-ended", {"after": after, "tokens": _stops(probe, tokenizer)})
    if not probe.has_tools:
        return
    try:
        called = probe.text([user(0), calling(1)], tools=True)
    except UserError:
        return  # reported by the check of tools
    after = called[called.rindex(FUNCTION) :] if FUNCTION in called else ""
    if after and not _ends(probe, tokenizer, after):
        yield Finding("call-not-ended", {"after": after[-60:], "tokens": _stops(probe, tokenizer)})


def _ends(probe: Probe, tokenizer: Tokenizer, text: str) -> bool:
    return not probe.stop_ids.isdisjoint(tokenizer.encode(text, add_special=False, allow_special=True))


def _stops(probe: Probe, tokenizer: Tokenizer) -> str:
    return ", ".join(str(tokenizer.vocabulary[index]) for index in sorted(probe.stop_ids)) or "none"
