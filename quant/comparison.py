"""Compares two models on prompts: their greedy replies, the calls in them, and their distributions."""

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from mycli.quant.evaluate import STREAM_BYTES, require_same_vocabulary, token_divergence
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message, Tool, takes_tools
from mycli.runtime.tokenizer.parsing.reasoning_parser import prompt_end, reasoning_format
from mycli.runtime.tokenizer.parsing.tool_formats import (
    HERMES,
    ToolFormat,
    describe_tools_in_system_message,
    own_tool_format,
)
from mycli.runtime.tokenizer.parsing.tool_parser import ToolParser
from mycli.runtime.tokenizer.tokenizer import Tokenizer

_RESAMPLES = 2000

Calls = tuple[tuple[str, str], ...]
CallChange = Literal["none", "same", "changed", "lost", "new"]


@dataclass(frozen=True)
class ComparedPrompt:
    """A conversation to reply to, or a text; `tools` as in a request of OpenAI's API."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        template = tokenizer.template
        if template is None:
            return tokenizer.encode("\n".join(message.content for message in self.messages), add_special=True)
        if self.tools and not takes_tools(template.source(tools=True)):
            return tokenizer.apply_chat_template(describe_tools_in_system_message(self.messages, self.tools))
        return tokenizer.apply_chat_template(self.messages, tools=list(self.tools) or None)


@dataclass(frozen=True)
class ComparedReply:
    """`text`: without reasoning and calls; `calls`: name and arguments of each; `ended`: not by the limit of tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    ended: bool
    calls: Calls


@dataclass(frozen=True)
class ModelReplies:
    """The greedy replies of a model, their speed, and the bytes of its weights and cache."""

    replies: tuple[ComparedReply, ...]
    seconds: tuple[float, ...]  # per reply token, one for each prompt
    nbytes: int


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The syntax in which a model writes calls; that of the prompt that describes tools if it has none of its own."""
    return own_tool_format(tokenizer) or HERMES


def read_reply(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], tools: Sequence[Tool], syntax: ToolFormat
) -> tuple[str, Calls]:
    """Return the text of a reply without reasoning, and name and canonical arguments of its calls."""
    parser = ToolParser(syntax, tools) if tools else None
    reader = ReplyReader(
        tokenizer,
        prompt_end=prompt_end(tokenizer, prompt),
        reasoning=reasoning_format(tokenizer),
        tools=parser,
        tool_format=syntax if tools else None,
    )
    piece = reader.feed(SequenceOutput(0, tuple(tokens), finish_reason="stop"))
    return piece.content, tuple((call.name, _canonical(call.arguments)) for call in piece.calls)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def reply_to_all(
    opened: OpenedModel, prompts: Sequence[ComparedPrompt], limit: int, progress: ReportProgress = silent
) -> ModelReplies:
    """Reply greedily to each prompt with at most `limit` tokens. Raises UserError."""
    tokenizer, syntax = opened.tokenizer, tool_format(opened.tokenizer)
    replies, seconds = [], []
    progress("replies", 0, len(prompts))
    for _ in Completion(opened.model, opened.engine, prompts[0].encode(tokenizer), SamplingParams(), limit=4):
        pass  # the first reply chooses kernels
    for number, prompt in enumerate(prompts, start=1):
        ids = prompt.encode(tokenizer)
        reply = Completion(opened.model, opened.engine, ids, SamplingParams(), limit=limit)
        began = time.perf_counter()
        for _ in reply:
            pass
        total = time.perf_counter() - began
        # Decoding only: how long a prompt takes depends on what is cached of it. Of one token there is only the total.
        speed = reply.timing.tokens_per_second
        seconds.append(1 / speed if speed > 0 else total)
        text, calls = read_reply(tokenizer, ids, reply.tokens, prompt.tools, syntax)
        ended = reply.finish_reason == "stop"
        replies.append(ComparedReply(tuple(ids), tuple(reply.tokens), text, ended, calls))
        progress("replies", number, len(prompts))
    return ModelReplies(tuple(replies), tuple(seconds), opened.engine.nbytes + opened.model.runner.nbytes)


@dataclass(frozen=True)
class PromptComparison:
    """`divergence`: index of the first token that differs, None if the replies are the same; KL in nats, per token."""

    name: str
    tokens: int  # of the reference's reply
    divergence: int | None
    kl: float
    same_top1: float
    same_answer: bool  # but for case and white space
    calls: CallChange


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, None for a single prompt, which shows no spread."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """A candidate compared with a reference; `speed`: how many times as fast the candidate decodes."""

    prompts: tuple[PromptComparison, ...]
    kl: Interval
    same_top1: float
    speed: Interval
    reference_bytes: int
    candidate_bytes: int

    @property
    def changed_replies(self) -> int:
        return sum(prompt.divergence is not None for prompt in self.prompts)

    @property
    def changed_answers(self) -> int:
        return sum(not prompt.same_answer for prompt in self.prompts)

    @property
    def changed_calls(self) -> int:
        return sum(prompt.calls in ("changed", "lost", "new") for prompt in self.prompts)


def compare_replies(
    prompts: Sequence[ComparedPrompt],
    reference: ModelReplies,
    candidate: ModelReplies,
    divergences: Sequence[tuple[Tensor, Tensor]],
) -> Comparison:
    """Combine the replies of both models with the `measure_divergence` of the candidate."""
    # By prompt and not by token: a long reply with one wrong turn would otherwise outweigh all others.
    rows = []
    for prompt, ours, theirs, (kl, same) in zip(
        prompts, reference.replies, candidate.replies, divergences, strict=True
    ):
        rows.append(
            PromptComparison(
                name=prompt.name,
                tokens=len(ours.tokens),
                divergence=_first_difference(ours, theirs),
                kl=float(kl.mean()),
                same_top1=float(same.mean()),
                same_answer=_answer(ours.text) == _answer(theirs.text),
                calls=_compare_calls(ours.calls, theirs.calls),
            )
        )
    means = [row.kl for row in rows]
    # The geometric mean: of two times 2 and 1/2 as fast, the arithmetic one would make 1.25.
    ratios = [math.log(before / after) for before, after in zip(reference.seconds, candidate.seconds, strict=True)]
    logarithm = _interval(ratios)
    return Comparison(
        prompts=tuple(rows),
        kl=_interval(means),
        same_top1=sum(row.same_top1 for row in rows) / len(rows),
        speed=_exponential(logarithm),
        reference_bytes=reference.nbytes,
        candidate_bytes=candidate.nbytes,
    )


def _first_difference(ours: ComparedReply, theirs: ComparedReply) -> int | None:
    pairs = enumerate(zip_longest(ours.tokens, theirs.tokens))
    return next((index for index, pair in pairs if pair[0] != pair[1]), None)


def _answer(text: str) -> str:
    return " ".join(text.casefold().split())


def _compare_calls(ours: Calls, theirs: Calls) -> CallChange:
    if not ours or not theirs:
        return "lost" if ours else "new" if theirs else "none"
    return "same" if ours == theirs else "changed"


def _exponential(logarithm: Interval) -> Interval:
    low, high = (None if bound is None else math.exp(bound) for bound in (logarithm.low, logarithm.high))
    return Interval(math.exp(logarithm.value), low, high)


def _interval(values: Sequence[float]) -> Interval:
    # Tokens of a reply depend on each other, so prompts are resampled (bootstrap); their KL is far from normal.
    source = random.Random(0)
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, None, None)
    means = sorted(sum(source.choices(values, k=len(values))) / len(values) for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return Interval(mean, means[tail], means[-tail - 1])


@torch.no_grad()
def measure_divergence(
    reference: StreamedModel,
    candidate: StreamedModel,
    replies: Sequence[ComparedReply],
    progress: ReportProgress = silent,
) -> list[tuple[Tensor, Tensor]]:
    """KL(reference || candidate) and agreement of the likeliest token, at each token of the reference's replies.

    Both models read the reference's text, so the same tokens precede each position. Raises UsageError for
    different vocabularies.
    """
    require_same_vocabulary(reference.config, candidate.config)
    texts = [[*reply.prompt, *reply.tokens] for reply in replies]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    results: dict[int, tuple[Tensor, Tensor]] = {}
    row_bytes = sum(model.config.stream_width * model.placement.dtype.itemsize for model in (reference, candidate))
    while order:
        longest = len(texts[order[-1]])
        count = max(1, STREAM_BYTES // (row_bytes * longest))
        group, order = order[-count:], order[:-count]
        # Padded at the end, where no earlier position sees it.
        windows = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, index in zip(windows, group, strict=True):
            row[: len(texts[index])] = torch.tensor(texts[index])
        streams = [model.hidden(windows, progress) for model in (reference, candidate)]
        for row, index in enumerate(group):
            # Each token of the reply is predicted at the position before it; an end token at the last one.
            start, end = len(replies[index].prompt) - 1, len(texts[index]) - (not replies[index].ended)
            rows = [stream[row, start:end] for stream in streams]
            results[index] = token_divergence(candidate, rows[1], reference, rows[0])
    return [results[index] for index in range(len(texts))]


def as_prompts(values: Sequence[tuple[str, str | list[Message], Sequence[Mapping[str, Any]]]]) -> list[ComparedPrompt]:
    return [
        ComparedPrompt(name, (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt), tuple(tools))
        for name, prompt, tools in values
    ]
