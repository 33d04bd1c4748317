"""Test the token ids and the text of a prompt as clients read them."""

from collections.abc import Iterator
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from tests.support.served import ScriptedEngine, Served, serving

TALK = [{"role": "user", "content": "Hi"}]
TURN, REPLY = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def answering(reasoning: LoadedModel) -> Iterator[Served]:
    with serving(reasoning, ScriptedEngine(lambda request: [], context=64)) as served:
        yield served


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, TURN + REPLY),
        ({"add_generation_prompt": False}, TURN),
        ({"chat_template_kwargs": {"enable_thinking": False}}, f"{TURN}{REPLY}<think>\n\n</think>\n\n"),
        (
            {"tools": [TOOL]},
            '<|im_start|>system\n<tool_call> [{"type": "function", "function": {"name": "look"}}]',
        ),
    ],
    ids=["default", "no-reply", "arguments", "tools"],
)
def test_a_conversation_is_rendered_by_the_template(answering: Served, fields: Any, prompt: str) -> None:
    body = {"messages": TALK, **fields}
    rendered = answering.ask("POST", "/apply-template", body).json["prompt"]
    assert rendered.startswith(prompt) and (rendered == prompt or "tools" in fields)
    answer = answering.ask("POST", "/tokenize", body).json
    tokenizer = answering.service.loaded.tokenizer
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 64,
        "tokens": tokenizer.encode(rendered, add_special=False, allow_special=True),
    }


def test_a_long_text_has_all_its_tokens(answering: Served) -> None:
    text = "a b " * 20_000
    answer = answering.ask("POST", "/tokenize", {"prompt": text}).json
    assert (
        answer["tokens"] == answering.service.loaded.tokenizer.encode(text, add_special=True)
        and answer["count"] > 1 << 14
    )


@pytest.mark.parametrize("names", ["", "prompt content", "prompt messages", "prompt messages content"])
def test_a_prompt_comes_in_a_single_form(answering: Served, names: str) -> None:
    forms = {"prompt": "Hi", "content": "Hi", "messages": TALK}
    answer = answering.ask("POST", "/tokenize", {name: forms[name] for name in names.split()})
    assert answer.status == 400 and "give either prompt or messages" in answer.error["message"]


def test_ids_are_a_text_in_the_words_of_vllm_and_of_llama_cpp(answering: Served) -> None:
    ids = answering.ask("POST", "/tokenize", {"prompt": "Hello"}).json["tokens"]
    assert answering.ask("POST", "/detokenize", {"tokens": ids}).json == {"prompt": "Hello", "content": "Hello"}
    size = answering.service.loaded.vocabulary_size
    refused = answering.ask("POST", "/detokenize", {"tokens": [size]})
    assert refused.status == 400 and refused.error["param"] == "tokens"
