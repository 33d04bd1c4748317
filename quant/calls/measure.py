"""Measures tool calls: how far two models agree on the tokens of built-in calls, and how often one calls validly."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycli.quant.calls.prompts import CallPrompt, call_prompts
from mycli.quant.calls.record import CallCounts, TokenAgreement
from mycli.quant.comparison import Calls, ComparedReply, greedy_reply, measure_divergence, read_reply, tool_format
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.replies.completion import complete_all
from mycli.runtime.hub.resolve import Source
from mycli.runtime.open import open_folder
from mycli.runtime.tokenizer.chat_template import Tool
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.json_fields import strict_json

_REPLY_TOKENS = 128  # the longest built-in call takes 40 to 60, without reasoning
_TOGETHER = 8
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
}


@dataclass(frozen=True)
class StructuredReply:
    """A built-in call in a model's format: tokens, and the kind of each, None for values and reasoning."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    kinds: tuple[str | None, ...]


def structured_reply(tokenizer: Tokenizer, prompt: CallPrompt) -> StructuredReply:
    """Render a prompt with its expected call. Raises UserError if the template refuses it."""
    template = tokenizer.template
    thinks = template is not None and "reasoning_content" in template.source(tools=True)
    tools = list(prompt.tools)
    start = tokenizer.apply_chat_template(prompt.messages, tools=tools)
    whole = tokenizer.apply_chat_template(
        [*prompt.messages, prompt.reply(thinks)], tools=tools, add_generation_prompt=False
    )
    # The template may write the beginning of a reply in another way than it asks for one.
    common = next((index for index, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    reply = whole[common:]
    end = next((index + 1 for index, token in enumerate(reply) if token in tokenizer.eos), len(reply))
    reply = reply[:end]
    return StructuredReply(tuple(whole[:common]), tuple(reply), _kinds(tokenizer, reply, prompt))


def _kinds(tokenizer: Tokenizer, reply: Sequence[int], prompt: CallPrompt) -> tuple[str | None, ...]:
    pieces = [tokenizer.token_bytes(token) for token in reply]
    text = b"".join(pieces)
    values, names = _spans(text, prompt)
    kinds: list[str | None] = []
    start = 0
    for token, piece in zip(reply, pieces, strict=True):
        span = range(start, start + len(piece))
        start = span.stop
        if any(index in names for index in span):
            kinds.append("names")
        elif token in tokenizer.control_ids or not span:
            kinds.append("markers")
        elif any(index in values for index in span) and all(
            index in values or text[index : index + 1].isspace() for index in span
        ):
            kinds.append(None)
        else:
            kinds.append("markers" if any(chr(text[index]).isalnum() for index in span) else "punctuation")
    return tuple(kinds)


def _spans(text: bytes, prompt: CallPrompt) -> tuple[set[int], set[int]]:
    # The positions of values and reasoning, and those of the names of function and arguments.
    values, names = set[int](), set[int]()
    reasoning = text.find(prompt.reasoning.encode())
    after = 0
    if reasoning >= 0:
        after = reasoning + len(prompt.reasoning.encode())
        values.update(range(reasoning, after))
    first = text.find(prompt.name.encode(), after)
    if first < 0:
        return values, names
    names.update(range(first, first + len(prompt.name.encode())))
    after = first + len(prompt.name.encode())
    for name, value in prompt.values:
        # Between marks: the name of an argument may be one letter.
        match = re.compile(rb"(?<=[\"=>{,\s])" + re.escape(name.encode()) + rb"(?=\W)").search(text, after)
        if match is None:
            continue
        names.update(range(*match.span()))
        value_at = text.find(value.encode(), match.end())
        if value_at >= 0:
            values.update(range(value_at, value_at + len(value.encode())))
    return values, names


def is_valid(calls: Calls, tools: Sequence[Tool]) -> bool:
    """Return True for one or more calls that each name one of `tools` and have arguments that its schema allows."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    return bool(calls) and all(name in functions and _fits(text, functions[name]) for name, text in calls)


def _fits(arguments: str, function: Mapping[str, Any]) -> bool:
    # The built-in schemas use these keywords only.
    try:
        values = strict_json(arguments.encode())
    except ValueError:
        return False
    schema = function["parameters"]
    if not isinstance(values, dict) or set(values) != set(schema["required"]):
        return False
    return all(_has_type(values[name], schema["properties"][name]) for name in values)


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    if not isinstance(value, _TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, list) and not all(_has_type(item, schema["items"]) for item in value):
        return False
    return value in schema.get("enum", (value,))


def _is_expected(calls: Calls, prompt: CallPrompt) -> bool:
    if len(calls) != 1 or calls[0][0] != prompt.name:
        return False
    try:
        return bool(strict_json(calls[0][1].encode()) == dict(prompt.arguments))
    except ValueError:
        return False


def count_calls(
    folder: ModelFolder, placement: Placement, memory_limit: int | None = None, progress: ReportProgress = silent
) -> CallCounts:
    """Reply greedily to the built-in prompts, in the model's own dtype.

    Raises ResourceError if the model does not fit in memory, or in `memory_limit` bytes.
    """
    tokenizer, prompts = folder.tokenizer(), call_prompts()
    thinking = _without_thinking(tokenizer)
    encoded = [tokenizer.apply_chat_template(p.messages, tools=list(p.tools), **thinking) for p in prompts]
    context = min(folder.config.max_context, max(map(len, encoded)) + _REPLY_TOKENS)
    config = EngineConfig(device=str(placement.device), context=context, sequences=_TOGETHER, memory_limit=memory_limit)
    syntax, calls = tool_format(tokenizer), list[Calls]()
    with open_folder(Source(folder.path.name, folder.path), folder, config) as opened:
        replies = [greedy_reply(opened, ids, _REPLY_TOKENS) for ids in encoded]
        finished = complete_all(opened.engine, ([reply] for reply in replies), _TOGETHER)
        for number, (reply, ids, prompt) in enumerate(zip(finished, encoded, prompts, strict=True), start=1):
            if reply[0].error is not None:
                raise reply[0].error
            calls.append(read_reply(tokenizer, ids, reply[0].tokens, prompt.tools, syntax)[1])
            progress("tool prompts", number, len(prompts))
    return CallCounts(
        valid=sum(is_valid(written, prompt.tools) for written, prompt in zip(calls, prompts, strict=True)),
        expected=sum(_is_expected(written, prompt) for written, prompt in zip(calls, prompts, strict=True)),
    )


def _without_thinking(tokenizer: Tokenizer) -> dict[str, Any]:
    # Reasoning would take most of the time, and its length says nothing of calls.
    template = tokenizer.template
    return {"enable_thinking": False} if template and "enable_thinking" in template.source(tools=True) else {}


def measure_structure(
    reference: StreamedModel, candidate: StreamedModel, progress: ReportProgress = silent
) -> tuple[TokenAgreement, dict[str, TokenAgreement]]:
    """The agreement of two models on the tokens of the built-in calls without values, and by kind of token."""
    tokenizer = reference.folder.tokenizer()
    replies = [structured_reply(tokenizer, prompt) for prompt in call_prompts()]
    texts = [ComparedReply(reply.prompt, reply.tokens, "", False, ()) for reply in replies]
    measured = measure_divergence(reference, candidate, texts, progress)
    kl, same = (torch.cat(list(column)) for column in zip(*measured, strict=True))
    kinds = [kind for reply in replies for kind in reply.kinds]
    rows = {name: [kind == name for kind in kinds] for name in sorted({kind for kind in kinds if kind is not None})}
    every = [kind is not None for kind in kinds]
    return _agreement(kl, same, every), {name: _agreement(kl, same, chosen) for name, chosen in rows.items()}


def _agreement(kl: torch.Tensor, same: torch.Tensor, chosen: Sequence[bool]) -> TokenAgreement:
    if not any(chosen):
        return TokenAgreement(0, 0.0, 1.0)
    mask = torch.tensor(chosen)
    return TokenAgreement(int(mask.sum()), float(kl[mask].double().mean()), float(same[mask].double().mean()))
