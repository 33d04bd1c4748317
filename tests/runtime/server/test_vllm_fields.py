"""Test fields of vLLM's requests: the minimum of tokens, stop strings in the text, token ids, truncation, content."""

from typing import Any

import pytest

from tests.runtime.server.conftest import Scripted
from tests.support.served import Answer, Served, joined

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def completion_tokens(answer: Answer) -> int:
    count: int = answer.json["usage"]["completion_tokens"]
    return count


@pytest.mark.parametrize(
    "fields", [{}, {"seed": 3, "temperature": 1}, {"logprobs": True}, {"n": 3, "seed": 1}], ids=str
)
def test_a_reply_has_the_minimum_of_tokens(served: Served, fields: dict[str, Any]) -> None:
    short = completion_tokens(served.chat(**fields))
    replies = fields.get("n", 1)
    long = completion_tokens(served.chat(min_tokens=40, max_tokens=50, **fields))
    assert short < 40 * replies <= long <= 50 * replies


def test_a_minimum_that_a_reply_has_anyway_changes_nothing(served: Served) -> None:
    whole = served.chat()
    for least in (0, completion_tokens(whole)):
        assert joined(served.chat(min_tokens=least)) == joined(whole)
    more = joined(served.chat(min_tokens=completion_tokens(whole) + 1, max_tokens=60))
    assert more[0].startswith(joined(whole)[0]) and more != joined(whole)


def test_stop_tokens_of_the_request_count_after_the_minimum(served: Served) -> None:
    first = served.chat(return_token_ids=True).json["choices"][0]["token_ids"]
    assert len(first) > 3
    assert completion_tokens(served.chat(stop_token_ids=[first[1]])) == 1
    assert completion_tokens(served.chat(stop_token_ids=[first[1]], min_tokens=3, max_tokens=9)) >= 3


@STREAMS
def test_a_stop_string_within_the_minimum_is_text(scripted: Scripted, stream: bool) -> None:
    with scripted("one two one two one two") as served:
        count = len(served.service.loaded.tokenizer.encode("one two one", add_special=False))
        answer = served.chat(stop=["two"], min_tokens=count, max_tokens=99, stream=stream)
        assert joined(answer)[::3] == ("one two one ", "stop")
        assert joined(served.chat(stop=["two"], stream=stream))[::3] == ("one ", "stop")


def test_a_format_ends_a_reply_before_its_minimum(served: Served) -> None:
    chosen = served.chat(regex="yes|no", min_tokens=20, max_tokens=30)
    assert joined(chosen)[0] in ("yes", "no") and joined(chosen)[3] == "stop"
    assert completion_tokens(served.chat(regex="a+", max_tokens=30)) < 20
    assert completion_tokens(served.chat(regex="a+", min_tokens=20, max_tokens=30)) >= 20


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, 8),
        (TEXT, {"min_tokens": 17}, 16),
        (TEXT, {"min_tokens": 3, "max_tokens": 0, "echo": True}, 0),
        ("/completion", {"min_tokens": 5, "n_predict": 4}, 4),
    ],
)
def test_a_minimum_above_the_limit_is_refused(served: Served, path: str, fields: dict[str, Any], most: int) -> None:
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    answer = served.ask("POST", path, {name: body[name] for name in [("prompt", "messages")[path == CHAT]]} | fields)
    assert answer.status == 400 and answer.error["param"] == "min_tokens"
    assert f"is more than the reply may have, {most}; lower it or raise max_tokens" in answer.error["message"]


def test_a_minimum_above_the_room_of_the_context_is_refused(served: Served) -> None:
    answer = served.chat(min_tokens=600)
    assert answer.status == 400 and answer.error["param"] == "min_tokens"
    answer = served.chat(min_tokens=3, use_beam_search=True, n=2)
    assert answer.status == 400 and answer.error["param"] == "min_tokens"


@STREAMS
def test_a_stop_string_is_part_of_the_text_on_request(scripted: Scripted, stream: bool) -> None:
    with scripted("one two three four") as served:
        for included, text in ((True, "one two th"), (False, "one ")):
            fields = {"stop": ["two th"], "include_stop_str_in_output": included, "stream": stream}
            assert joined(served.chat(**fields))[::3] == (text, "stop")
            answer = served.ask("POST", TEXT, {"prompt": "Go", "max_tokens": 99, **fields})
            choices = [event["choices"][0] for event in answer.events] if stream else answer.json["choices"]
            assert "".join(choice["text"] for choice in choices) == text


@STREAMS
def test_control_tokens_are_text_on_request(scripted: Scripted, reasoning: Any, stream: bool) -> None:
    with scripted("<think>\na\n</think>\n\none<|im_start|> two", model=reasoning) as served:
        for skipped, text in ((False, "one<|im_start|> two"), (True, "one two"), (None, "one two")):
            answer = served.chat(skip_special_tokens=skipped, stream=stream)
            assert joined(answer)[:2] == (text, "a\n")
        shown = served.chat(skip_special_tokens=False, stop=["<|im_start|>"], stream=stream)
        assert joined(shown)[::3] == ("one", "stop")
    with scripted("one<|im_start|> two") as served:
        body = {"prompt": "Go", "max_tokens": 99, "skip_special_tokens": False}
        assert served.ask("POST", TEXT, body).json["choices"][0]["text"] == "one<|im_start|> two"
        assert served.ask("POST", "/completion", body).json["content"] == "one<|im_start|> two"


@STREAMS
def test_token_ids_of_a_chat(served: Served, stream: bool) -> None:
    answer = served.chat(n=2, seed=1, temperature=1, return_token_ids=True, stream=stream, max_tokens=20)
    events = answer.events if stream else [answer.json]
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    prompt = served.ask("POST", "/tokenize", {"messages": messages}).json["tokens"]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt] * (1 + stream)
    for index in range(2):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        parts = [choice["delta"] if stream else choice["message"] for choice in choices]
        text = "".join(part.get("content") or "" for part in parts)
        assert served.ask("POST", "/detokenize", {"tokens": ids}).json["prompt"] == text
    assert "token_ids" not in str(served.chat(max_tokens=2, stream=stream).body)


def test_tokens_without_text_are_streamed_too(scripted: Scripted, reasoning: Any) -> None:
    """A tag is several tokens, none of which is text of the reply."""
    with scripted("<think>\na\n</think>\n\nb", model=reasoning) as served:
        ids = served.chat(return_token_ids=True).json["choices"][0]["token_ids"]
        events = served.chat(return_token_ids=True, stream=True).events
        streamed = [token for event in events for token in event["choices"][0].get("token_ids", ())]
        assert (
            streamed
            == ids
            == reasoning.tokenizer.encode("<think>\na\n</think>\n\nb", add_special=False, allow_special=True)
        )


@STREAMS
def test_token_ids_of_completions(served: Served, stream: bool) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    body = {"prompt": prompts, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "stream": stream}
    answer = served.ask("POST", TEXT, body)
    events = answer.events if stream else [answer.json]
    for index, prompt in enumerate(prompts):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [choice["prompt_token_ids"] for choice in choices] == [prompt] + [None] * (len(choices) - 1)
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert len(ids) == 6
        text = "".join(choice["text"] for choice in choices)
        assert served.ask("POST", "/detokenize", {"tokens": ids}).json["prompt"].strip() == text.strip()


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({"truncate_prompt_tokens": 5}, -5, None),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, -5, None),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, 0, 5),
        ({"truncate_prompt_tokens": 10**6}, 0, None),
        ({"truncate_prompt_tokens": -1}, 0, None),
        ({"truncation_side": "right"}, 0, None),
    ],
    ids=str,
)
def test_a_prompt_is_cut_to_its_last_tokens(
    scripted: Scripted, fields: dict[str, Any], first: int, last: int | None
) -> None:
    with scripted("Hi") as served:
        assert served.chat().status == served.chat(**fields).status == 200
        text = {"prompt": "one two three four five six seven", "max_tokens": 2}
        assert served.ask("POST", TEXT, text).status == served.ask("POST", TEXT, {**text, **fields}).status == 200
        prompts = served.service.worker.engine.prompts
        for whole, cut in (prompts[:2], prompts[2:]):
            assert cut == whole[first:last] and len(whole) > 5


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_prompt_is_cut_to_what_leaves_room(served: Served, path: str) -> None:
    long = "word " * 2000
    body = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    body |= {"max_tokens": 12, "ignore_eos": True}
    assert served.ask("POST", path, body).status == 400
    answer = served.ask("POST", path, {**body, "truncate_prompt_tokens": -1})
    assert answer.status == 200 and answer.json["usage"]["total_tokens"] == 512 + 1
    assert answer.json["usage"]["completion_tokens"] == 12
    for wrong in (0, -2):
        refused = served.ask("POST", path, {**body, "truncate_prompt_tokens": wrong})
        assert refused.status == 400 and refused.error["param"] == "truncate_prompt_tokens"


def test_a_reply_without_a_limit_fills_the_context(served: Served) -> None:
    answer = served.ask("POST", TEXT, {"prompt": [5] * 400, "max_tokens": -1, "ignore_eos": True, "temperature": 0})
    assert answer.json["usage"]["total_tokens"] == 512 + 1 and answer.json["choices"][0]["finish_reason"] == "length"


def test_strings_in_a_list_of_content_are_text(scripted: Scripted) -> None:
    parts = ["one", {"type": "text", "text": "two"}]
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with scripted("Hi") as served:
        for content in (parts, blocks):
            messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
            assert served.ask("POST", CHAT, {"messages": messages}).status == 200
        assert len(set(served.service.worker.engine.prompts)) == 1
        for content in ([5], [["a"]], ["\ud800"]):
            refused = served.ask("POST", CHAT, {"messages": [{"role": "user", "content": content}]})
            assert refused.status == 400 and refused.error["param"] == "messages.0.content.0"


def test_the_prompt_has_logprobs_by_token_id(served: Served) -> None:
    """They are those of `echo`, and each rank is the place of the token among the likeliest."""
    body = {"prompt": ["The capital of Japan is"] * 2 + ["Once upon"], "max_tokens": 2, "logprobs": 4, "temperature": 0}
    echoed = served.ask("POST", TEXT, {**body, "echo": True}).json["choices"][0]["logprobs"]
    choices = served.ask("POST", TEXT, {**body, "logprobs": 1, "n": 2, "prompt_logprobs": 4}).json["choices"]
    first, *entries = choices[0]["prompt_logprobs"]
    ids = served.ask("POST", "/tokenize", {"prompt": body["prompt"][0]}).json["tokens"]
    assert first is None and len(entries) == len(ids) - 1
    for index, (token, entry) in enumerate(zip(ids[1:], entries, strict=True), 1):
        chosen = entry[str(token)]
        assert next(iter(entry)) == str(token) and chosen["decoded_token"] == echoed["tokens"][index]
        assert chosen["logprob"] == echoed["token_logprobs"][index]
        ranks = sorted(other["rank"] for other in entry.values())
        assert ranks == ([1, 2, 3, 4] if chosen["rank"] <= 4 else [1, 2, 3, 4, chosen["rank"]])
        assert sorted(entry.values(), key=lambda other: -other["logprob"])[min(chosen["rank"], 5) - 1] == chosen
    assert {entry[str(token)]["rank"] > 4 for token, entry in zip(ids[1:], entries, strict=True)} == {False, True}
    assert all(choice["prompt_logprobs"] == choices[0]["prompt_logprobs"] for choice in choices[:4])
    assert (
        len(choices[4]["prompt_logprobs"]) < len(ids) and choices[4]["prompt_logprobs"] == choices[5]["prompt_logprobs"]
    )
    reply = choices[0]["logprobs"]
    assert len(reply["tokens"]) == 2 and all(len(top) <= 2 for top in reply["top_logprobs"])


def test_the_prompt_of_a_chat_has_logprobs_too(served: Served) -> None:
    answer = served.chat(prompt_logprobs=0, max_tokens=2, n=2, seed=1, return_token_ids=True).json
    first, *entries = answer["prompt_logprobs"]
    assert first is None and [list(entry) for entry in entries] == [[str(i)] for i in answer["prompt_token_ids"][1:]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert "prompt_logprobs" not in served.chat(max_tokens=2).json


@pytest.mark.parametrize(
    ("path", "text"), [(TEXT, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})]
)
def test_prompt_logprobs_are_refused_in_a_stream(served: Served, path: str, text: dict[str, Any]) -> None:
    answer = served.ask("POST", path, {**text, "prompt_logprobs": 1, "stream": True})
    assert answer.status == 400 and answer.error["param"] == "prompt_logprobs"
