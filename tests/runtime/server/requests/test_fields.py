"""Test that every request field of other servers is supported, refused by name, or irrelevant to the reply."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params as text_create_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import ValidationError

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests import fields
from mycli.runtime.server.requests.formats import Constraints, output_format
from mycli.runtime.server.requests.schemas import Sampling
from mycli.runtime.server.routes.messages_request import CountRequest, InputTool, counted_spec
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.runtime.server.conftest import Scripted
from tests.support.embedding_models import qwen3_embedding
from tests.support.interface_fields import (
    CHAT,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    INTERFACES,
    MESSAGES,
    NATIVE,
    RERANK,
    RESPONSES,
    TEXT,
    TOKENIZE,
)
from tests.support.paths import PICO
from tests.support.request_fields import EXCEPTIONS, FIELDS, HARMLESS, NAMED, REFUSED, SERVED
from tests.support.served import ScriptedEngine, Served, load_fp32, serving

_TALK = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": _TALK, "max_tokens": 1},
    TEXT: {"prompt": "Hello", "max_tokens": 1},
    NATIVE: {"prompt": "Hello", "n_predict": 1},
    RESPONSES: {"input": "Hello", "max_output_tokens": 1},
    MESSAGES: {"messages": _TALK, "max_tokens": 1},
    INPUT_TOKENS: {"input": "Hello"},
    COUNT_TOKENS: {"messages": _TALK},
    EMBEDDINGS: {"input": "Hello"},
    RERANK: {"query": "Hello", "documents": ["a", "b"]},
    TOKENIZE: {"messages": _TALK},
    DETOKENIZE: {"tokens": [5]},
}
CLIENTS = {
    "openai": {
        CHAT: chat_create_params.CompletionCreateParamsBase,
        TEXT: text_create_params.CompletionCreateParamsBase,
        RESPONSES: response_create_params.ResponseCreateParamsBase,
        INPUT_TOKENS: input_token_count_params.InputTokenCountParams,
        EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    },
    "anthropic": {
        MESSAGES: message_create_params.MessageCreateParamsBase,
        COUNT_TOKENS: message_count_tokens_params.MessageCountTokensParams,
    },
    "anthropic-beta": {
        MESSAGES: beta_create_params.MessageCreateParamsBase,
        COUNT_TOKENS: beta_count_tokens_params.MessageCountTokensParams,
    },
}
# (route, field) -> the interfaces that have it
SENT: dict[tuple[str, str], list[str]] = {}
EXTRA = {route: ("stream",) for route in (CHAT, TEXT, RESPONSES)} | {MESSAGES: ("stream", "output_format")}
for client, kinds in CLIENTS.items():
    for route, kind in kinds.items():
        for name in (*EXTRA.get(route, ()), *kind.__annotations__):
            SENT.setdefault((route, name), []).append(client)
for client, routes in INTERFACES.items():
    for route, names in routes.items():
        for name in names:
            SENT.setdefault((route, name), []).append(client)


@pytest.fixture(scope="module")
def answering(loaded: Any) -> Any:
    ids = loaded.tokenizer.encode("yes", add_special=False)
    with serving(loaded, ScriptedEngine(lambda request: ids)) as served:
        yield served


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = qwen3_embedding(tmp_path_factory.mktemp("embedding") / "model")
    with serving(*load_fp32(folder)) as served:
        yield served


@pytest.mark.parametrize("route, name", sorted(SENT), ids=lambda part: part)
def test_a_field_is_served_or_refused_by_name(answering: Served, embedding: Served, route: str, name: str) -> None:
    fate, value = EXCEPTIONS.get((route, name), FIELDS[name])
    body = {**BODIES[route], name: value}
    if name == "function_call":
        body["functions"] = FIELDS["functions"][1]
    answer = (embedding if route in (EMBEDDINGS, RERANK) else answering).ask("POST", route, body)
    if fate == REFUSED:
        assert answer.status == 400 and str(answer.error["param"]).startswith(name), answer.body[:300]
        return
    assert answer.status == 200, answer.body[:300]
    assert answer.headers.get("x-mycli-omitted") == (f"field {name}" if fate == NAMED else None)
    assert (fate == HARMLESS) == (name in fields.HARMLESS_FIELDS and (route, name) not in EXCEPTIONS)


@pytest.mark.parametrize("name", [name for name, (fate, _) in FIELDS.items() if fate == REFUSED])
def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse(answering: Served, name: str) -> None:
    assert answering.ask("POST", CHAT, {**BODIES[CHAT], name: None}).status == 200


@pytest.mark.parametrize(
    ("names", "neutral", "other"),
    [
        ("lora stop_regex functions", (None, False, 0, 0.0, "", [], {}), 1),
        ("typical_p typ_p repeat_penalty n_cmpl", (None, 1, 1.0), 2),
        ("typical_p n_cmpl", (None, 1), True),  # true is not the number 1
        ("top_n_sigma n_keep adaptive_target t_max_predict_ms", (None, 0, -1), -2),
        ("thinking_token_budget reasoning_budget_tokens thinking_budget_tokens", (None, -1), -2),
        ("thinking_token_budget reasoning_budget_tokens thinking_budget_tokens", (None, -1), 0),
        ("skip_special_tokens separate_reasoning use_activation", (None, True), False),
        ("modalities", (None, [], ["text"]), ["text", "audio"]),
        ("embd_normalize", (None, 2), 3),
    ],
)
def test_values_of_a_field_that_change_nothing_are_accepted(names: str, neutral: tuple[Any, ...], other: Any) -> None:
    for name in names.split():
        assert [fields.check_fields({name: value}, ()) for value in neutral] == [[]] * len(neutral)
        with pytest.raises(ApiError, match=f"{name}: is not supported") as error:
            fields.check_fields({name: other}, ())
        assert error.value.param == name and fields.check_fields({name: other}, (name,)) == []


def test_a_field_of_no_interface_is_ignored_and_named(answering: Served) -> None:
    answer = answering.ask("POST", CHAT, {**BODIES[CHAT], "temprature": 0.5, "a\nb": 1})
    assert answer.status == 200 and answer.headers["x-mycli-omitted"] == "field temprature, field unprintable"


def test_figures_of_llama_cpp_are_named_only_where_they_are_wanted(answering: Served) -> None:
    for wanted, named in ((True, "field return_progress, field timings_per_token"), (False, None)):
        figures = {"return_progress": wanted, "timings_per_token": wanted}
        answer = answering.ask("POST", MESSAGES, {**BODIES[MESSAGES], **figures})
        assert answer.status == 200 and answer.headers.get("x-mycli-omitted") == named


def test_a_thread_is_refused_with_the_code_after_which_anthropics_sdk_goes_on_without(answering: Served) -> None:
    answer = answering.ask("POST", MESSAGES, {**BODIES[MESSAGES], "thread": {"type": "create"}})
    assert answer.status == 400
    assert answer.error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other = answering.ask("POST", MESSAGES, {**BODIES[MESSAGES], "container": "c"})
    assert other.status == 400 and "details" not in other.error


def test_parts_that_nothing_reads_are_named_by_their_path(answering: Served) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    tool = {"type": "function", "function": {**FIELDS["functions"][1][0], "strict": None, "examples": [1]}}
    body = {"messages": [message, {**message, "prefix": True, "id": "m"}], "tools": [tool], "max_tokens": 1}
    answer = answering.ask("POST", CHAT, body)
    assert answer.status == 200
    assert answer.headers["x-mycli-omitted"] == "field messages.prefix, field tools.function.examples"
    many = answering.ask("POST", CHAT, {**body, "messages": [{**message, **{f"f{i}": 1 for i in range(5000)}}]})
    assert many.headers["x-mycli-omitted"].count("field messages.f") == 32


def test_a_window_of_penalties_is_refused_where_penalties_are_set(answering: Served) -> None:
    for penalty, status in ((0, 200), (0.5, 400)):
        answer = answering.ask("POST", CHAT, {**BODIES[CHAT], "repeat_last_n": 64, "frequency_penalty": penalty})
        assert answer.status == status, answer.body
    assert answer.error["param"] == "repeat_last_n"


def test_a_window_of_the_whole_reply_changes_no_penalty() -> None:
    def check(window: int | None, *known: str) -> list[str]:
        return fields.check_fields({"presence_penalty": 0.5, "repeat_last_n": window}, ("presence_penalty", *known))

    assert [check(window) for window in (None, -1)] == [[], []] and check(64, "repeat_last_n") == []
    for window in (-2, 0, 64):
        with pytest.raises(ApiError, match="repeat_last_n: is not supported"):
            check(window)


def test_llama_cpps_words_of_tokenization(answering: Served) -> None:
    ids = answering.ask("POST", TOKENIZE, {"content": "Hello <|im_end|>"}).json["tokens"]
    plain = answering.ask("POST", TOKENIZE, {"content": "Hello <|im_end|>", "parse_special": False}).json["tokens"]
    assert len(ids) < len(plain) == len(answering.ask("POST", TOKENIZE, {"prompt": "Hello <|im_end|>"}).json["tokens"])
    assert answering.ask("POST", DETOKENIZE, {"tokens": plain}).json["content"] == "Hello <|im_end|>"


def test_the_start_token_is_vllms_default_and_not_llama_cpps(loaded: LoadedModel, tmp_path: Path) -> None:
    shutil.copy(PICO / "tokenizer_config.json", tmp_path)
    tokenizer, start = json.loads((PICO / "tokenizer.json").read_text()), "<|im_start|>"
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    text = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {start: {"id": start, "ids": [ids[start]], "tokens": [start]}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": known}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with serving(replace(loaded, tokenizer=Tokenizer.load(tmp_path, 4096)), ScriptedEngine(lambda _: [])) as served:

        def starts(body: dict[str, Any]) -> bool:
            return bool(served.ask("POST", TOKENIZE, body).json["tokens"][0] == ids[start])

        assert starts({"prompt": "Hello"}) and not starts({"prompt": "Hello", "add_special_tokens": False})
        assert starts({"content": "Hello", "add_special": True}) and not starts({"content": "Hello"})


# The smallest and the largest value of each.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "deadline": (0.1, 86400),
}


@pytest.mark.parametrize("name", RANGES)
def test_sampling_settings_end_at_their_limits(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(Sampling.model_validate({name: value}), name) == value
    step = 1 if isinstance(low, int) and abs(high) > 10 else 0.001
    for value in (low - step, high + step):
        with pytest.raises(ValidationError, match=rf"{name}\n  Input should be (greater|less) than"):
            Sampling.model_validate({name: value})


def test_whole_numbers_may_have_a_point(answering: Served) -> None:
    """The JSON of Lua and of others with one type of number."""
    whole = {"max_tokens": 1.0, "n": 2.0, "top_k": 40.0, "seed": 1.0, "stop_token_ids": [7.0], "temperature": 1}
    answer = answering.ask("POST", CHAT, {**BODIES[CHAT], **whole})
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2, answer.body
    for name, value in (("max_tokens", 2.5), ("n", True), ("top_k", "4"), ("seed", 1e300)):
        answer = answering.ask("POST", CHAT, {**BODIES[CHAT], name: value})
        assert answer.status == 400 and answer.error["param"] == name


def test_a_seed_of_minus_one_is_none(answering: Served) -> None:
    seeds = [answering.service.sampling(Sampling(seed=seed)).seed for seed in (-1, 0, -2)]
    assert seeds == [None, 0, -2]


def test_tools_of_anthropics_interface_need_a_name_and_a_schema() -> None:
    for tool, missing in (({"name": "f"}, "input_schema"), ({"type": "custom", "input_schema": {}}, "name")):
        with pytest.raises(ValidationError, match=f"{missing} is required"):
            InputTool.model_validate(tool)
    assert not InputTool.model_validate({"type": "bash_20250124"}).callable


@pytest.mark.parametrize(
    ("content", "text"),
    [("42", "42"), (None, ""), ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "4\n2")],
    ids=["text", "none", "blocks"],
)
def test_results_of_tools_in_anthropics_interface_are_messages(content: Any, text: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    talk = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    messages = counted_spec(CountRequest.model_validate({"messages": talk})).messages
    assert [(message.role, message.content) for message in messages] == [("assistant", ""), ("tool", text)]


def test_the_table_holds_every_field_that_is_refused_or_ignored() -> None:
    assert {*fields.UNSUPPORTED_FIELDS, *fields.HARMLESS_FIELDS} - set(FIELDS) <= {
        # in earlier versions of these servers
        *("logits_processors", "typ_p", "image_data", "input_prefix", "input_suffix", "input_extra"),
        *("thinking_budget_tokens", "anthropic_version", "anthropic_beta"),
    }
    assert {fate for fate, _ in FIELDS.values()} == {SERVED, REFUSED, HARMLESS, NAMED}


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "a{3}"},
        {"ebnf": 'root ::= "aaa"'},
        {"grammar": 'root ::= x\nx ::= "a" "aa"'},
        {"json_schema": '{"const": "aaa"}'},
        {"structured_outputs": {"choice": ["aaa"]}},
        {"structured_outputs": {"grammar": 'start: "aaa"'}},
        {"guided_regex": "aaa"},
        {"response_format": {"type": "gbnf", "gbnf": 'root ::= "a"+ "a"'}},
    ],
    ids=lambda constraint: "-".join(constraint),
)
def test_a_constraint_in_any_servers_words_is_kept(served: Served, constraint: dict[str, Any]) -> None:
    reply = served.chat("Write.", max_tokens=60, **constraint)
    text = reply.json["choices"][0]["message"]["content"]
    assert set(text) - {'"'} == {"a"} and (len(text.strip('"')) == 3 or "response_format" in constraint)


@pytest.mark.parametrize(("json_object", "refused"), [(True, True), (False, False), (None, False)])
def test_a_schema_and_any_json_object_contradict(json_object: bool | None, refused: bool) -> None:
    asked = {"structured_outputs": {"json": {"const": "aaa"}, "json_object": json_object}}
    body = Constraints.model_validate(asked)
    if refused:
        with pytest.raises(ApiError, match=r"^structured_outputs\.json and structured_outputs\.json_object cannot be"):
            output_format(body)
    else:
        answer = output_format(body)
        assert answer is not None and answer.json_schema is not None
        assert answer.json_schema.schema_ == {"const": "aaa"}


def test_a_stop_token_of_the_request_ends_the_reply(scripted: Scripted) -> None:
    """The engine gets it in addition to the model's own stop tokens."""
    with scripted("one two") as served:
        assert served.chat(stop_token_ids=[7]).status == 200
        worker = served.service.worker
        request = served.service.request([1], _sampling([7]), 5, None, None)
        assert request.stop_ids == {7} | served.service.loaded.stop_ids and worker.underway == 0


def _sampling(ids: list[int]) -> Sampling:
    return Sampling.model_validate({"stop_token_ids": ids})


def test_a_minimum_as_large_as_the_limit_is_served(served: Served) -> None:
    """genai-perf and aiperf send the same minimum and maximum, and ignore end tokens."""
    asked = {"messages": _TALK, "max_tokens": 24, "min_tokens": 24, "ignore_eos": True, "temperature": 0}
    assert served.ask("POST", CHAT, asked).json["usage"]["completion_tokens"] == 24
