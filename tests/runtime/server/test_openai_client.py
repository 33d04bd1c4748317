"""Test with OpenAI's own client, unmodified: it understands the replies and the server its requests."""

import json
import re
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import Request
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.served import Served

JAPAN = "What is the capital of Japan?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Says it.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Tokyo", "Oslo"]}},
            },
        },
    }
    for name in ("weather", "population")
]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def question(text: str = JAPAN) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_reply_is_the_one_of_the_engine_alone(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.apply_chat_template([Message("user", JAPAN)])
    engine = Engine(loaded.runner, CacheShape.contiguous(512), loaded.vocabulary_size)
    request = Request(tuple(prompt), limit=40, stop_ids=loaded.stop_ids)
    alone = Completion(engine, request, ReplyReader(loaded.tokenizer))
    expected = "".join(alone)
    whole = client.chat.completions.create(model="pico", messages=question(), temperature=0, max_tokens=40)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
    assert whole.usage and whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == len(alone.tokens)
    stream = client.chat.completions.create(
        model="pico",
        messages=question(),
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(alone.tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_so_far_is_in_every_chunk_on_request(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "pico", "temperature": 0, "max_tokens": 4, "stream": True, "stream_options": options}
    for stream in (
        client.chat.completions.create(messages=question(), **asked),
        client.completions.create(prompt="Once upon", **asked),
    ):
        counts = [chunk.usage.completion_tokens for chunk in stream]
        assert counts == sorted(counts) and len(counts) > 2 and counts[-2:] == [4, 4], counts


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def draw(seed: int, n: int) -> list[str | None]:
        found = client.chat.completions.create(
            model="pico", messages=question("Tell me a story."), temperature=1, seed=seed, n=n, max_tokens=12
        )
        assert [choice.index for choice in found.choices] == list(range(n))
        return [choice.message.content for choice in found.choices]

    draw(7, 1)  # the cache contents are then the same each time
    first = draw(7, 3)
    assert len(set(first)) == 3 and draw(7, 3) == first
    assert draw(8, 2) == first[1:]  # each choice has the next seed


def test_choices_of_a_stream_are_told_apart(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pico", messages=question("Tell me a story."), temperature=1, seed=7, n=2, max_tokens=12, stream=True
    )
    texts, ends = {0: "", 1: ""}, {}
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    whole = client.chat.completions.create(
        model="pico", messages=question("Tell me a story."), temperature=1, seed=7, n=2, max_tokens=12
    )
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert set(ends) == {0, 1}


def test_logprobs_are_of_the_tokens(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="pico", messages=question(), temperature=0, logprobs=True, top_logprobs=3, max_tokens=8
    )
    logprobs = found.choices[0].logprobs
    assert logprobs and logprobs.content
    assert "".join(one.token for one in logprobs.content) == found.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3 and bytes(one.bytes or ()).decode() == one.token
        assert one.logprob == max(top.logprob for top in one.top_logprobs) <= 0
    plain = {"model": "pico", "messages": question(), "max_tokens": 1, "logprobs": False}
    assert client.chat.completions.create(**plain, top_logprobs=0).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs: needs logprobs"):
        client.chat.completions.create(**plain, top_logprobs=1)


def test_stop_strings_and_limits_end_a_reply(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(model="pico", messages=question(), temperature=0, stop=[" Japan", "zz"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of", "stop")
    cut = client.chat.completions.create(model="pico", messages=question(), temperature=0, max_completion_tokens=2)
    assert cut.choices[0].finish_reason == "length" and cut.usage and cut.usage.completion_tokens == 2


def test_biases_and_penalties_change_what_is_drawn(client: openai.OpenAI, loaded: LoadedModel) -> None:
    (the,) = loaded.tokenizer.encode("The", add_special=False)
    banned = client.chat.completions.create(
        model="pico", messages=question(), temperature=0, logit_bias={str(the): -100}, max_tokens=4
    )
    assert not (banned.choices[0].message.content or "").startswith("The")
    prompt = "la la la la la la la la la la la"
    plain = client.completions.create(model="pico", prompt=prompt, temperature=0, max_tokens=12)
    varied = client.completions.create(
        model="pico", prompt=prompt, temperature=0, max_tokens=12, frequency_penalty=2, presence_penalty=2
    )
    assert plain.choices[0].text != varied.choices[0].text


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Leo", "Ada"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_kept(client: openai.OpenAI, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model="pico",
        messages=question("How old is Leo?"),
        temperature=temperature,
        seed=3,
        response_format=form,
        max_tokens=100,
    )
    value = json.loads(found.choices[0].message.content or "")
    assert value["name"] in ("Leo", "Ada") and 0 <= value["age"] <= 99 and set(value) == {"name", "age"}


def test_an_object_of_a_schema_is_kept_as_llama_cpp_takes_it(client: openai.OpenAI) -> None:
    word: dict[str, object] = {"const": "42"}
    for kind, schema in (("json_object", SCHEMA), ("json_object", word), ("json_schema", SCHEMA)):
        found = client.chat.completions.create(
            model="pico",
            messages=question("How old is Leo?"),
            temperature=0,
            max_tokens=400,
            response_format={"type": kind, "schema": schema},  # type: ignore[call-overload]  # no type for it
        )
        value = json.loads(found.choices[0].message.content or "")
        assert value == "42" or set(value) == {"name", "age"}


def test_an_object_an_expression_and_a_grammar_are_kept(client: openai.OpenAI) -> None:
    def ask(form: dict[str, object]) -> str:
        found = client.chat.completions.create(
            model="pico",
            messages=question("How old is Leo?"),
            temperature=0,
            max_tokens=60,
            extra_body={"response_format": form},
        )
        return found.choices[0].message.content or ""

    assert ask({"type": "json_object"}).lstrip().startswith("{")
    assert re.fullmatch("Leo is [0-9]{2}[.]", ask({"type": "regex", "regex": "Leo is [0-9]{2}[.]"}))
    assert ask({"type": "lark", "lark": 'start: "yes" | "no"'}) in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "population"}}])
def test_tools_are_called_where_they_must_be(client: openai.OpenAI, choice: object) -> None:
    """The template of pico does not support tools; they are added to the prompt and a grammar enforces the call."""
    arguments = {"model": "pico", "messages": question(), "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    found = client.chat.completions.create(**arguments, parallel_tool_calls=False, max_tokens=120)
    (call,) = found.choices[0].message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall) and found.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Tokyo", "Oslo")
    assert call.function.name == "population" or choice == "required"
    stream = client.chat.completions.create(**arguments, parallel_tool_calls=False, max_tokens=120, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    streamed = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert {one.index for one in streamed} == {0} and [one.id is None for one in streamed[:2]] == [False, True]
    written = "".join(one.function.arguments or "" for one in streamed if one.function)
    assert written == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    answered = [
        *question(),
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "14 million"},
    ]
    follow = client.chat.completions.create(
        model="pico", messages=answered, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=5
    )
    assert follow.choices[0].finish_reason in ("stop", "length")


def test_prompts_of_a_completion(client: openai.OpenAI, loaded: LoadedModel) -> None:
    texts = ["Once upon", "The capital of"]
    ids = [loaded.tokenizer.encode(text, add_special=True) for text in texts]

    def ask(prompt: object) -> list[str]:
        found = client.completions.create(model="pico", prompt=prompt, temperature=0, max_tokens=4, n=2)  # type: ignore[call-overload]  # any of them
        assert [choice.index for choice in found.choices] == list(range(len(found.choices)))
        return [choice.text for choice in found.choices]

    assert ask(texts) == ask(ids) == [*ask(texts[0]), *ask(ids[1])]
    stream = client.completions.create(model="pico", prompt=texts[0], temperature=0, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ask(texts[0])[0]


def test_an_echo_scores_the_prompt_as_the_harness_reads_it(client: openai.OpenAI, loaded: LoadedModel) -> None:
    """Follow lm-eval's contract: [[ids]], one token, echo; the continuation's sum equals that of single steps."""
    ids = loaded.tokenizer.encode("The capital of Japan is Tokyo.", add_special=False)
    found = client.completions.create(
        model="pico", prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    (choice,) = found.choices
    assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
    assert len(choice.logprobs.token_logprobs) == len(ids) + 1 and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.tokens and choice.text == "".join(choice.logprobs.tokens[: len(ids)])
    last = len(ids) - 1
    forced = client.completions.create(
        model="pico", prompt=[ids[:last]], max_tokens=1, logprobs=20, temperature=0, logit_bias={str(ids[last]): 100}
    )
    assert forced.choices[0].logprobs and forced.choices[0].logprobs.token_logprobs
    assert forced.choices[0].logprobs.token_logprobs[0] == pytest.approx(choice.logprobs.token_logprobs[last], abs=1e-3)


def test_a_streamed_echo_of_a_long_prompt_has_every_logprob(client: openai.OpenAI, loaded: LoadedModel) -> None:
    """The scored prompt is computed in several chunks, each of which is an event."""
    ids = loaded.tokenizer.encode("The capital of Japan is Tokyo. " * 40, add_special=False)
    asked = {"model": "pico", "prompt": [ids], "max_tokens": 1, "logprobs": 0, "echo": True, "temperature": 0}
    (whole,) = client.completions.create(**asked).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    streamed = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs or ()]
    assert whole.logprobs and streamed == whole.logprobs.token_logprobs and len(streamed) == len(ids) + 1
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_nothing_is_written_after_an_echo_of_no_tokens(client: openai.OpenAI) -> None:
    found = client.completions.create(model="pico", prompt="Once upon", max_tokens=0, echo=True, logprobs=0)
    assert found.choices[0].text == "Once upon" and found.usage and found.usage.completion_tokens == 0


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="pico", input=JAPAN, temperature=0, max_output_tokens=40)
    chat = client.chat.completions.create(model="pico", messages=question(), temperature=0, max_tokens=40)
    assert whole.output_text == chat.choices[0].message.content and whole.status == "completed"
    events = list(client.responses.create(model="pico", input=JAPAN, temperature=0, max_output_tokens=40, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == whole.output_text
    counted = client.responses.input_tokens.count(model="pico", input=JAPAN)
    assert whole.usage and counted.input_tokens == whole.usage.input_tokens
    cut = client.responses.create(model="pico", input=JAPAN, temperature=0, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details and cut.usage and cut.usage.output_tokens == 2
    assert [item.status for item in whole.output] == ["completed"] and [item.status for item in cut.output] == [
        "incomplete"
    ]
    cuts = client.responses.create(model="pico", input=JAPAN, temperature=0, max_output_tokens=2, stream=True)
    ended = [event.item.status for event in cuts if event.type == "response.output_item.done"]
    assert ended == ["incomplete"]


def test_responses_have_every_field_that_the_client_requires(client: openai.OpenAI) -> None:
    """The client builds its objects without validation, so that a missing field is found by its user."""
    asked = {"model": "pico", "input": JAPAN, "temperature": 0, "max_output_tokens": 4}
    whole = client.responses.create(**asked)
    last = list(client.responses.create(**asked, stream=True))[-1]
    for found in (whole, last):
        type(found).model_validate(found.to_dict())


def test_responses_call_tools_and_keep_schemas(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    called = client.responses.create(
        model="pico", input=JAPAN, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = called.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Tokyo", "Oslo")
    conversation = [
        {"role": "user", "content": JAPAN},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model="pico", input=conversation, max_output_tokens=4).output_text
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    kept = client.responses.create(model="pico", input="How old is Leo?", text=form, temperature=0)
    assert set(json.loads(kept.output_text)) == {"name", "age"}


def test_models_are_listed_under_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pico", "alias/of-it"]
    assert client.models.retrieve("alias/of-it").model_dump()["context_length"] == 512
    aliased = client.chat.completions.create(model="alias/of-it", messages=question(), max_tokens=1)
    assert aliased.model == "alias/of-it"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=question())
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="pico", messages=question(), max_tokens=4000)
    assert long.value.code == "context_length_exceeded" and "512" in long.value.message and "4000" in long.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="pico", messages=question(), temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
