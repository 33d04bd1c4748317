"""`mycli cache why`: the first difference between the prompts of two requests, and its cause."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.load import open_config
from mycli.cli.output import Column
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import read_input

if TYPE_CHECKING:
    from mycli.runtime.tokenizer.prompt_difference import PromptParts

EXAMPLES = (
    """mycli cache why '{"messages": [{"role": "system", "content": "It is 07:10."}]}' """
    """'{"messages": [{"role": "system", "content": "It is 07:25."}]}' --model pico""",
)
_MAX_BODY = 4 << 20
_COLUMNS = (
    Column("shared", lambda result: f"{result['shared_tokens']} of {result['first_tokens']} tokens"),
    Column("before", lambda result: _quoted(result["before"])),
    Column("first", lambda result: _quoted(result["earlier"])),
    Column("second", lambda result: _quoted(result["later"])),
    Column("cause", lambda result: "; ".join(result["causes"]) or None),
    Column("verdict", "verdict"),
)


def _quoted(text: str) -> str | None:
    return repr(text) if text else None


@command
def cache_why(
    call: Call,
    first: Annotated[str, options.argument("A.json", "The body of the earlier request: a file, or the JSON itself.")],
    second: Annotated[str, options.argument("B.json", "The body of the later request.")],
    model: Annotated[
        str, options.option("--model", "MODEL", "Whose tokenizer and template to use.", show_default="as in A.json")
    ] = "",
) -> None:
    """Say why the prompt of one request misses the cache of another.

    The files are bodies of POST /v1/chat/completions, /v1/responses or /v1/messages. Shows how many tokens both prompts
    share, the text around the first difference, and what recurs as its cause: a date in the system prompt, tools in
    another order, dropped reasoning, changed template arguments, edited or removed messages.
    """
    from mycli.runtime.server.http.api_error import ApiError
    from mycli.runtime.server.requests.chat_prompt import compare_prompts, render_chat

    sources = [_source(text, label) for text, label in ((first, "A.json"), (second, "B.json"))]
    bodies = [_body(data, source) for data, source in sources]
    name = model or bodies[0].get("model")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{sources[0][1]}: names no model", "add --model MODEL")
    tokenizer = open_config(call, name).tokenizer()
    if tokenizer.template is None:
        raise UsageError(f"{name} has no chat template", "add --model MODEL with another one")
    prompts = []
    for (_, source), body in zip(sources, bodies, strict=True):
        try:
            parts = _parts(body)
            prompts.append((render_chat(tokenizer, parts), parts))
        except ApiError as error:
            raise UsageError(f"{source}: {error.message}", "give the body of a chat request") from None
    result = compare_prompts(tokenizer, prompts[0], prompts[1])
    verdict = "the second request misses the cache from there on"
    if result.continues:
        verdict = "the second prompt continues the first: all of it can be reused"
    call.out.show({**result.fields(), "verdict": verdict}, _COLUMNS)


def _source(text: str, label: str) -> tuple[bytes, str]:
    # The body and its name in messages. A body is an object; a file whose name begins so can be named ./{...
    if text.lstrip().startswith("{"):
        return text.encode(), label
    return read_input(Path(text), _MAX_BODY), text


def _body(data: bytes, source: str) -> Mapping[str, Any]:
    from mycli.runtime.utils.json_fields import strict_json

    try:
        body = strict_json(data)
    except ValueError as error:
        raise UsageError(f"{source}: not valid JSON: {error}", "give the body of a request") from None
    if not isinstance(body, dict):
        raise UsageError(f"{source}: not an object", "give the body of a request")
    return body


def _parts(body: Mapping[str, Any]) -> "PromptParts":
    from mycli.runtime.server.requests.item_store import ItemStore
    from mycli.runtime.server.requests.schemas import validated
    from mycli.runtime.server.routes.chat_completions import ChatRequest, completion_spec
    from mycli.runtime.server.routes.messages_request import CountRequest, counted_spec
    from mycli.runtime.server.routes.response_input import input_messages
    from mycli.runtime.server.routes.responses_request import ResponsesRequest, callable_tools, response_spec
    from mycli.runtime.tokenizer.prompt_difference import PromptParts

    tools = body.get("tools") or ()
    if "input" in body:
        request = validated(ResponsesRequest, body)
        messages, omitted = input_messages(request, ItemStore())
        spec = response_spec(request, messages, omitted, callable_tools(request))
    elif "system" in body or any("input_schema" in tool for tool in tools if isinstance(tool, dict)):
        spec = counted_spec(validated(CountRequest, body))
    else:
        spec = completion_spec(validated(ChatRequest, body))
    return PromptParts(spec.messages, spec.offered_tools, spec.arguments)
