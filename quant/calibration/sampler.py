"""Draws calibration windows: rows of tokens of equal length, never padded. The same seed gives the same windows.

The bundled text mixes prose, code, many languages, conversations and tool calls in the model's chat template, and
random tokens, which reach the whole vocabulary. It shares nothing with the held-out text of `quant.evaluate`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.calibration.documents import Document, documents
from mycli.runtime.errors import ModelError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.tool_formats import own_tool_format
from mycli.runtime.tokenizer.tokenizer import MAX_TEXT, Tokenizer

MIN_TOKENS = 256  # in all windows; with fewer, more noise than signal is fitted
# Shares of the windows; with a chat template, conversations replace half of the prose, and if it knows tools, calls
# replace a quarter of both.
_MIX = {"prose": 16, "code": 8, "languages": 4, "random": 2}
_MIX_WITH_CHAT = {"prose": 8, "conversations": 8, "code": 8, "languages": 4, "random": 2}
_MIX_WITH_CALLS = {"prose": 6, "conversations": 6, "calls": 4, "code": 8, "languages": 4, "random": 2}
_SPREAD = 4  # times the tokens needed are read, so that windows come from many rows
_TRIES = 4  # for a chat template that runs into its time limit, before the last try
_PASSAGE = 800  # characters of a passage that a conversation quotes


@dataclass(frozen=True)
class Calibration:
    """Windows int64 [samples, seq]; every second one begins with BOS if the tokenizer has one."""

    windows: Tensor
    sha256: str  # of the windows, thus of everything that can change the result
    mix: dict[str, int]  # number of windows of each kind

    @property
    def tokens(self) -> int:
        return self.windows.numel()


def _bundled(name: str) -> str:
    return (resources.files("mycli.quant") / "calibration_text" / name).read_text(encoding="utf-8")


def calibrate(
    text: Path | None, tokenizer: Tokenizer, vocab_size: int, samples: int, seq: int, seed: int
) -> Calibration:
    if text is not None:
        return from_file(text, tokenizer, samples, seq, seed)
    return bundled(tokenizer, vocab_size, samples, seq, seed)


def bundled(tokenizer: Tokenizer, vocab_size: int, samples: int, seq: int, seed: int) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    weights = _MIX
    if _has_template(tokenizer):
        weights = _MIX_WITH_CALLS if _has_calls(tokenizer) else _MIX_WITH_CHAT
    mix = _shares(weights, samples)
    parts = []
    for kind, count in mix.items():
        if kind == "random":
            known = [index for index in range(vocab_size) if tokenizer.vocabulary[index] is not None]
            ids = torch.tensor(known)[torch.randint(len(known), (count * seq,), generator=generator)]
        elif kind == "conversations":
            ids = _conversations(tokenizer, _dialogues(generator), count * seq)
        elif kind == "calls":
            ids = _conversations(tokenizer, _calls(generator), count * seq)
        else:
            ids = _encode(_bundled(f"{kind}.txt"), tokenizer)
        parts.append(_windows(ids, count, seq, generator))
    return _calibration(torch.cat(parts), tokenizer, generator, mix)


def from_file(path: Path, tokenizer: Tokenizer, samples: int, seq: int, seed: int) -> Calibration:
    """Draw at most `samples` windows of `seq` tokens from a file (see `documents`), without overlap.

    Raises NotFoundError or UsageError for a file that cannot be read or is too short.
    """
    parts, missing = [torch.empty(0, dtype=torch.int64)], _SPREAD * samples * seq
    for document in documents(path):
        parts.append(_document(document, tokenizer))
        missing -= len(parts[-1])
        if missing <= 0:
            break
    ids = torch.cat(parts)
    if len(ids) < max(seq, MIN_TOKENS):
        raise UsageError(
            f"{path} has {len(ids)} tokens; calibration needs {max(seq, MIN_TOKENS)}",
            code="longer-text-or-shorter-windows",
        )
    generator = torch.Generator().manual_seed(seed)
    count = min(samples, len(ids) // seq)
    windows = _windows(ids, count, seq, generator)
    return _calibration(windows, tokenizer, generator, {"file": count})


def check_windows(samples: int, seq: int, max_context: int) -> None:
    """Raise UsageError for a window length or a number of windows that is not possible."""
    if seq < 2 or seq > max_context:
        raise UsageError(
            f"windows of {seq} tokens are not possible: the model takes 2 to {max_context}", code="choose-seq"
        )
    if samples * seq < MIN_TOKENS:
        raise UsageError(
            f"{samples} samples of {seq} tokens are fewer than {MIN_TOKENS} tokens in all",
            code="longer-or-more-samples",
        )


def _apply_template(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> list[int]:
    # A template's time limit is wall-clock time: a busy machine must not change the windows of a seed.
    for _ in range(_TRIES):
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
        except ModelError as error:
            if "Deadline" not in error.message:
                raise
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)


def _has_template(tokenizer: Tokenizer) -> bool:
    # A broken template is no reason not to quantize.
    if tokenizer.template is None:
        return False
    try:
        _apply_template(tokenizer, [Message("user", "Hello"), Message("assistant", "Hello!")])
    except UserError:
        return False
    return True


def _has_calls(tokenizer: Tokenizer) -> bool:
    if own_tool_format(tokenizer) is None:
        return False
    try:
        for dialogue in _tool_dialogues():
            _apply_template(tokenizer, dialogue.messages, dialogue.tools)
    except UserError:
        return False
    return True


def _shares(weights: dict[str, int], total: int) -> dict[str, int]:
    """Split `total` by weight; the largest remainders are rounded up."""
    whole = sum(weights.values())
    exact = {kind: total * weight / whole for kind, weight in weights.items()}
    counts = {kind: int(share) for kind, share in exact.items()}
    rest = sorted(exact, key=lambda kind: counts[kind] - exact[kind])
    for kind in rest[: total - sum(counts.values())]:
        counts[kind] += 1
    return {kind: count for kind, count in counts.items() if count}


def _encode(text: str, tokenizer: Tokenizer) -> Tensor:
    ids: list[int] = []
    for start in range(0, len(text), MAX_TEXT):
        ids += tokenizer.encode(text[start : start + MAX_TEXT], add_special=False)
    return torch.tensor(ids, dtype=torch.int64)


def _document(document: Document, tokenizer: Tokenizer) -> Tensor:
    if isinstance(document, str):
        return _encode(document, tokenizer)
    if tokenizer.template is None:
        return _encode("\n\n".join(message.content for message in document), tokenizer)
    return torch.tensor(_apply_template(tokenizer, document), dtype=torch.int64)


def _windows(ids: Tensor, count: int, seq: int, generator: torch.Generator) -> Tensor:
    """Windows [count, seq] evenly spread over ids with random starts; they overlap only if the ids do not suffice."""
    ids = ids.repeat(-(-seq // max(1, len(ids)))) if len(ids) < seq else ids
    room = len(ids) - seq
    slack = max(0, len(ids) - count * seq) // count if count else 0
    starts = []
    for index in range(count):
        first = index * room // max(1, count - 1) if slack == 0 else index * (seq + slack)
        jitter = int(torch.randint(slack + 1, (1,), generator=generator)) if slack else 0
        starts.append(min(first + jitter, room))
    return torch.stack([ids[start : start + seq] for start in starts]) if starts else ids.new_empty(0, seq)


def _calibration(windows: Tensor, tokenizer: Tokenizer, generator: torch.Generator, mix: dict[str, int]) -> Calibration:
    # Kinds are shuffled, so that a batch has several.
    windows = windows[torch.randperm(len(windows), generator=generator)]
    if tokenizer.bos is not None:
        begun = windows[::2]
        windows[::2] = torch.cat([torch.full_like(begun[:, :1], tokenizer.bos), begun[:, :-1]], dim=1)
    return Calibration(windows, hashlib.sha256(windows.numpy().tobytes()).hexdigest(), mix)


@dataclass(frozen=True)
class _Dialogue:
    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None


def _conversations(tokenizer: Tokenizer, dialogues: Iterator[_Dialogue], tokens: int) -> Tensor:
    ids: list[int] = []
    for dialogue in dialogues:
        ids += _apply_template(tokenizer, dialogue.messages, dialogue.tools)
        if len(ids) >= tokens:
            return torch.tensor(ids, dtype=torch.int64)
    raise AssertionError("dialogues never end")


def _calls(generator: torch.Generator) -> Iterator[_Dialogue]:
    dialogues = _tool_dialogues()
    while True:
        for index in torch.randperm(len(dialogues), generator=generator).tolist():
            yield dialogues[index]


def _tool_dialogues() -> list[_Dialogue]:
    dialogues = []
    for record in json.loads(_bundled("tool_conversations.json")):
        messages = [
            Message(**{**fields, "tool_calls": tuple(fields.get("tool_calls", ()))}) for fields in record["messages"]
        ]
        dialogues.append(_Dialogue(messages, record["tools"]))
    return dialogues


def _dialogues(generator: torch.Generator) -> Iterator[_Dialogue]:
    written: list[list[str]] = json.loads(_bundled("conversations.json"))
    prose = _bundled("prose.txt")
    while True:
        for index in torch.randperm(len(written), generator=generator).tolist():
            messages = [
                Message("user" if position % 2 == 0 else "assistant", text)
                for position, text in enumerate(written[index])
            ]
            yield _Dialogue(messages)
            if index % 2:
                continue
            start = int(torch.randint(len(prose) - 2 * _PASSAGE, (1,), generator=generator))
            middle, end = start + _PASSAGE, start + 2 * _PASSAGE
            passage = f"Continue this text:\n\n{prose[start:middle].strip()}"
            yield _Dialogue([Message("user", passage), Message("assistant", prose[middle:end].strip())])
