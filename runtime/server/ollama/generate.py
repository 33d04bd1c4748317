"""POST /api/generate: Ollama's completion of a prompt, with the chat template unless `raw` or with a `suffix`."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import reply_room
from mycli.runtime.server.ollama.rendering import answer_ollama
from mycli.runtime.server.ollama.request import (
    OllamaGenerateRequest,
    ollama_spec,
    read_format,
    read_options,
    refuse_fields,
)
from mycli.runtime.server.routes.chat_spec import prepare_chat
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message


async def ollama_generate(service: Service, request: Request) -> Response:
    """Answer a prompt, in Ollama's form."""

    def prepare(body: OllamaGenerateRequest) -> Prepared | None:
        refuse_fields(body)
        return _prepared(service, body) if body.prompt or body.suffix else None

    return await answer_ollama(service, request, OllamaGenerateRequest, prepare, as_message=False)


def _prepared(service: Service, body: OllamaGenerateRequest) -> Prepared:
    prompt = body.prompt or ""
    if body.suffix or body.raw or service.loaded.tokenizer.template is None:
        return _raw(service, body, prompt)
    system = [Message("system", body.system)] if body.system else []
    spec = ollama_spec(body, [*system, Message("user", prompt)], read_options(body, service.context))
    return prepare_chat(service, replace(spec, place="prompt"))


def _raw(service: Service, body: OllamaGenerateRequest, prompt: str) -> Prepared:
    sampling, limit, omitted = read_options(body, service.context)
    ids = service.fim_prompt(prompt, body.suffix, "suffix").ids if body.suffix else service.text_prompt(prompt)
    if limit is not None:
        limit = min(limit, max(reply_room(service.context, len(ids)), 1))
    service.check_fits(ids, limit, "prompt")
    grammar = service.grammar(read_format(body))
    request = service.request(ids, sampling, limit, grammar, body.top, fills_in=bool(body.suffix))
    reader = ReplyReader(service.loaded.tokenizer, sampling.text_rules, before=ids)
    return Prepared([(request, [reader])], [ids], omitted=omitted)
