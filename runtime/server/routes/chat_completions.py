"""POST /v1/chat/completions: OpenAI's chat."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.server.http.api_error import ApiError, invalid_value, unsupported_parameter
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.requests.formats import Constraints, output_format
from mycli.runtime.server.requests.schemas import (
    MAX_TOOLS,
    AllowedToolsChoice,
    BeamFields,
    ChatMessage,
    ForReply,
    FunctionName,
    FunctionSpec,
    NamedTool,
    No,
    PromptTruncation,
    ReasoningOptions,
    Sampling,
    StreamFigures,
    StreamOptions,
    ThinkingBudget,
    TokenLimit,
    ToolSpec,
    Verbosity,
)
from mycli.runtime.server.routes.chat_spec import ChatSpec, prepare_chat
from mycli.runtime.server.routes.prompt_logprobs import PromptLogprobs, prompt_logprobs
from mycli.runtime.server.routes.wire import (
    OpenAIRendering,
    chat_logprobs,
    chat_messages,
    chat_tools,
    non_text_parts,
    strict_tools,
)
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import Interface
from mycli.runtime.tokenizer.chat_template import Effort, effort_arguments

FINISH = {"stop_string": "stop", "deadline": "length", "cancelled": "stop"}


class ChatReasoning(ReasoningOptions):
    """The options of OpenRouter; exclude: reason, but leave the reasoning out of the reply."""

    exclude: bool | None = None


class ChatRequest(
    ForReply, Sampling, StreamFigures, BeamFields, Constraints, ThinkingBudget, PromptTruncation, PromptLogprobs
):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    n: int | None = Field(None, ge=1, le=64)
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None  # of llama.cpp
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required", "any"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionSpec] | None = Field(None, max_length=MAX_TOOLS)  # the older form of tools
    function_call: Literal["auto", "none"] | FunctionName | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    reasoning: ChatReasoning | None = None  # of OpenRouter and SGLang
    include_reasoning: bool | None = None  # of vLLM and OpenRouter
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    documents: list[dict[str, Any]] | None = Field(None, max_length=1024)  # of vLLM: for the template
    continue_final_message: bool | None = None  # of vLLM and SGLang
    add_generation_prompt: bool | None = None  # of vLLM; off only together with continue_final_message
    add_special_tokens: No | None = None  # of vLLM: the template writes them
    echo: No | None = None
    return_token_ids: bool | None = None  # of vLLM and SGLang

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)


def _prepare(service: Service, body: ChatRequest) -> Prepared:
    _check(service, body)
    return prepare_chat(service, completion_spec(body))


def _check(service: Service, body: ChatRequest) -> None:
    if body.n is not None and body.n > service.settings.limits.choices:
        raise invalid_value("n", f"at most {service.settings.limits.choices}")
    if body.top_logprobs and not body.logprobs:  # 0 asks for nothing, and chat clients send it always
        raise invalid_value("top_logprobs", "needs logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "needs stream")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported_parameter("add_generation_prompt", "false needs continue_final_message")
    if body.add_generation_prompt and body.continue_final_message:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise ApiError(400, message, "invalid_value", param="add_generation_prompt")
    if body.functions and body.tools:
        raise ApiError(400, "functions cannot be combined with tools", "invalid_value", param="functions")


def completion_spec(body: ChatRequest) -> ChatSpec:
    """Return the conversation of a request and how to continue it. Raises ApiError."""
    choice, named, allowed = _choice(body)
    limits = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    limit = next((limit for limit in limits if limit is not None), None)
    functions = [ToolSpec(type="function", function=function) for function in body.functions or ()]
    tools, omitted = chat_tools(body.tools or functions)
    reasoning = body.reasoning or ReasoningOptions()
    switch = {} if reasoning.enabled is None else {"enable_thinking": reasoning.enabled}
    documents = {} if body.documents is None else {"documents": body.documents}
    verbosity = ["field verbosity"] if body.verbosity in ("low", "high") else []
    results = [message.content for message in body.messages if message.role in ("tool", "function")]
    unread = [f"part {kind}" for content in results for kind in non_text_parts(content)]
    return ChatSpec(
        messages=chat_messages(body.messages),
        sampling=body,
        tools=tools,
        omitted_tools=omitted,
        omitted=[*verbosity, *unread],
        strict=strict_tools(body.tools or functions),
        choice=choice,
        named=named,
        allowed=allowed,
        parallel=body.parallel_tool_calls is not False and not body.functions,
        format=output_format(body),
        arguments=effort_arguments(body.reasoning_effort or reasoning.effort)
        | switch
        | documents
        | (body.chat_template_kwargs or {}),
        continued=bool(body.continue_final_message),
        thinking_budget=body.thinking_budget(reasoning.max_tokens),
        count=body.n or 1,
        limit=None if limit == -1 else limit,
        beams=body.beams(body.n or 1),
        truncation=body,
        top=body.most_logprobs((body.top_logprobs or 0) if body.logprobs else None, body.stream),
        prompt_logprobs=body.prompt_logprobs is not None,
    )


def _choice(body: ChatRequest) -> tuple[str, str | None, Sequence[str] | None]:
    # auto, none or required; the only tool that may be called; the tools that may be called.
    choice = body.tool_choice
    if choice is None and body.functions:
        if isinstance(body.function_call, FunctionName):
            return "required", body.function_call.name, None
        return body.function_call or "auto", None, None
    if isinstance(choice, NamedTool):
        return "required", choice.function.name, None
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode, None, [tool.function.name for tool in choice.allowed_tools.tools]
    return "required" if choice == "any" else choice or "auto", None, None


class ChatRendering(OpenAIRendering):
    """Writes replies as chat.completion, whole or in chunks."""

    def __init__(self, service: Service, prepared: Prepared, body: ChatRequest, ids: ReplyIds) -> None:
        model = body.model or service.name
        head = {"id": ids.name, "created": ids.created, "model": model, "object": "chat.completion.chunk"}
        super().__init__(prepared, head, body.stream_options, body)
        self._ids = ids
        self._tokenizer, self._logprobs = service.loaded.tokenizer, bool(body.logprobs)
        self._top, self._prompt_top = body.top_logprobs or 0, body.prompt_logprobs
        self._as_function = bool(body.functions)  # the older form, with one call
        self._shows_reasoning, self._shows_ids = body.shows_reasoning, bool(body.return_token_ids)
        self._prompt = {"prompt_token_ids": prepared.prompts[0]} if self._shows_ids else {}

    def begin(self) -> Iterable[bytes]:
        for index in range(self._prepared.replies):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._choice_event({**choice, "finish_reason": None}, self._prompt)

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        empty = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": None}
        yield from self._progress_events(piece, empty)
        delta: dict[str, Any] = {}
        if piece.reasoning and self._shows_reasoning:
            # vLLM renamed the field in 0.32: clients read one or the other.
            delta |= {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
        if piece.content:
            delta["content"] = piece.content
        delta |= self._call_delta(piece)
        logprobs = chat_logprobs(self._tokenizer, piece.logprobs, self._top) if piece.logprobs else None
        if delta or logprobs or (self._shows_ids and piece.tokens):
            yield self._chunk(piece.index, delta, logprobs, None, self._ids_of(piece))
        if piece.end is not None:
            yield self._chunk(piece.index, {}, None, self._reason(piece))

    def keep_alive(self) -> Iterable[bytes]:
        yield self._chunk(0, {}, None, None)

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for reply in replies:
            self._counts.add(reply)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
            if reply.calls:
                message |= {"content": reply.content or None, **self._whole_calls(reply)}
            if reply.reasoning and self._shows_reasoning:
                message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
            logprobs = chat_logprobs(self._tokenizer, reply.logprobs, self._top) if self._logprobs else None
            end = self._reason(reply)
            choice = {"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": end}
            choices.append(choice | self._ids_of(reply))
        scores: dict[str, Any] = {}
        if self._prompt_top is not None:
            scores = {"prompt_logprobs": prompt_logprobs(self._tokenizer, replies, self._prompt_top)}
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, **self._prompt, **scores, **self._summary()}

    def _ids_of(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.tokens} if self._shows_ids else {}

    def _reason(self, piece: Piece) -> str:
        end = FINISH.get(piece.end or "stop", piece.end or "stop")
        return "function_call" if self._as_function and end == "tool_calls" else end

    def _whole_calls(self, reply: Piece) -> dict[str, Any]:
        functions = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
        if self._as_function:
            return {"function_call": functions[0]}
        named = [{"id": self._ids.next("call_"), "type": "function", "function": function} for function in functions]
        return {"tool_calls": named}

    def _call_delta(self, piece: Piece) -> dict[str, Any]:
        deltas: list[dict[str, Any]] = []
        for call in piece.calls:
            function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
            if self._as_function:
                return {"function_call": function} if call.index == 0 else {}
            head = {"id": self._ids.next("call_"), "type": "function"} if call.name else {}
            deltas.append({"index": call.index, **head, "function": function})
        return {"tool_calls": deltas} if deltas else {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        end: str | None,
        ids: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end, **(ids or {})}
        return self._choice_event(choice)


CHAT = Interface("chat", "chatcmpl-", ChatRequest, _prepare, ChatRendering)


async def chat_completions(service: Service, request: Request) -> Response:
    """Continue a conversation."""
    return await CHAT.reply(service, request)
