"""Test that reasoning is separated from content for any chunking of the reply, without losing text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.reasoning_parser import (
    REASONING_FORMATS,
    THINK,
    Part,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
    prompt_end,
    reasoning_format,
)
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO
from tests.support.small_tokenizers import SIMPLE, make


def split(text: str, cuts: list[int], prompt_end: str = "") -> list[Part]:
    splitter = ReasoningParser(prompt_end)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [part for a, b in zip(places, places[1:], strict=False) for part in splitter.feed(text[a:b])]
    return parts + splitter.flush()


@pytest.mark.parametrize("count", [0, 500])
def test_the_end_of_a_prompt_is_short_and_has_its_marks(count: int) -> None:
    tokenizer = Tokenizer.load(PICO, 4096)
    ids = tokenizer.encode(" word" * count + "<|im_start|>assistant\n", add_special=False, allow_special=True)
    end = prompt_end(tokenizer, ids)
    assert end.endswith("<|im_start|>assistant\n") and len(end) < 500


def joined(parts: list[Part], reasoning: bool) -> str:
    return "".join(part.text for part in parts if part.reasoning is reasoning)


fragments = st.lists(st.sampled_from(["<think>", "</think>", "<", "thi", "/think>", "a", "\n", " ", "é"]), max_size=9)


@given(fragments.map("".join), st.lists(st.integers(0, 40), max_size=12), st.sampled_from(["", "<think>\n"]))
def test_cuts_change_nothing(text: str, cuts: list[int], prompt_end: str) -> None:
    parts, whole = split(text, cuts, prompt_end), split(text, [], prompt_end)
    assert "".join(part.text for part in parts) == text
    assert (joined(parts, True), joined(parts, False)) == (joined(whole, True), joined(whole, False))


@pytest.mark.parametrize(
    ("text", "prompt_end", "reasoning", "content"),
    [
        ("<think>a</think>b", "", "<think>a</think>", "b"),
        ("\n<think>a</think>b", "", "\n<think>a</think>", "b"),
        ("a</think>b", "assistant\n<think>\n", "a</think>", "b"),
        ("b <think>a</think>", "", "", "b <think>a</think>"),
        ("<think>a</think>b</think>c", "", "<think>a</think>", "b</think>c"),
        ("<think>never ends </thi", "", "<think>never ends </thi", ""),
        ("<thin", "", "", "<thin"),
        ("", "", "", ""),
    ],
)
def test_only_the_beginning_reasons(text: str, prompt_end: str, reasoning: str, content: str) -> None:
    parts = split(text, list(range(len(text))), prompt_end)
    assert (joined(parts, True), joined(parts, False)) == (reasoning, content)


GPT_OSS, GEMMA, MISTRAL, SEED, HY3, APERTUS, COHERE, SOLAR, GRANITE, HUNYUAN = REASONING_FORMATS
# format, end of the prompt, reply, its reasoning and its content
REPLIES = {
    "gpt-oss": (
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
        "Hm. So.",
        "I look.\n\n42",
    ),
    "gpt-oss-json": (GPT_OSS, "<|start|>assistant", "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    "gpt-oss-call": (
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.f json<|message|>{}",
        "Hm.",
        "<|channel|>commentary to=functions.f json<|message|>{}",
    ),
    "gemma-4": (GEMMA, "<|turn>model\n", "<|channel>thought\nHm.<channel|>4", "Hm.", "4"),
    "gemma-4-off": (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "4 <channel|>", "", "4 <channel|>"),
    "mistral": (MISTRAL, "[/INST]", "[THINK]Hm.[/THINK]4", "Hm.", "4"),
    "seed": (SEED, "assistant\n", "<seed:think>Hm.</seed:think>4", "Hm.", "4"),
    "hy-3": (HY3, "<think:opensource>", "Hm.</think:opensource>4", "Hm.", "4"),
    "apertus": (APERTUS, "", "<|inner_prefix|>Hm.<|inner_suffix|>4", "Hm.", "4"),
    "cohere": (
        COHERE,
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
        "Hm.",
        "4",
    ),
    "solar": (
        SOLAR,
        "<|begin|>assistant",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>4<|end|>",
        "Hm.",
        "4",
    ),
    "granite": (GRANITE, "", "<think>Hm.</think>\n<response>4 </response> 5</response>\n", "Hm.", "4 </response> 5"),
    "granite-plain": (GRANITE, "", "4 </response>", "", "4 </response>"),
    "granite-unframed": (GRANITE, "", "<think>Hm.</think>4 </response>", "Hm.", "4 </response>"),
    "granite-framed": (GRANITE, "", "<response>4</response>", "", "4"),
    "granite-cut": (GRANITE, "", "<think>Hm.</think><response>4 </resp", "Hm.", "4 </resp"),
    "hunyuan": (HUNYUAN, "", "<think>\nHm.\n</think>\n<answer>\n4\n</answer>", "\nHm.\n", "\n4\n"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_marks_of_each_model(name: str) -> None:
    form, prompt_end, reply, reasoning, content = REPLIES[name]
    for step in (1, 2, 7, len(reply)):
        parser = ReasoningParser(prompt_end, form)
        parts = [part for at in range(0, len(reply), step) for part in parser.feed(reply[at : at + step])]
        texts = [part for part in parts + parser.flush() if not part.mark]
        assert (joined(texts, True), joined(texts, False)) == (reasoning, content)


@pytest.mark.parametrize("form", REASONING_FORMATS, ids=lambda form: form.open)
def test_no_format_hides_another(form: ReasoningFormat) -> None:
    assert find_reasoning_format(" ".join(form.template_markers)) is form
    assert find_reasoning_format("<think>") is find_reasoning_format("") is THINK


@pytest.mark.parametrize("form", [THINK, *REASONING_FORMATS], ids=lambda form: form.open)
def test_content_without_reasoning_is_passed_on_at_once(form: ReasoningFormat) -> None:
    parser = ReasoningParser("", form)
    assert [parser.feed("Hi"), parser.feed(" you"), parser.flush()] == [[Part("Hi", False)], [Part(" you", False)], []]
    parser = ReasoningParser(form.open, form)
    assert parser.inside and parser.feed("Hm") == [Part("Hm", True)]


@pytest.mark.parametrize("step", [1, 5, 100])
def test_a_call_ends_the_reasoning(step: int) -> None:
    """Models may call a tool without closing their reasoning; the content begins with the mark of the call."""
    parser, reply = ReasoningParser("<think>\n", calls=("<call>", "[CALL]")), "Hm. [CALL]f <call></think>"
    parts = [part for at in range(0, len(reply), step) for part in parser.feed(reply[at : at + step])]
    parts += parser.flush()
    assert (joined(parts, True), joined(parts, False)) == ("Hm. ", "[CALL]f <call></think>")
    assert not parser.inside and not any(part.mark for part in parts)


@pytest.mark.parametrize("step", [1, 100])
def test_white_space_is_no_content_of_its_own(step: int) -> None:
    """No blank line is added before it, and none after it where nothing else came before."""
    message = "<|start|>assistant<|channel|>final<|message|>"
    for reply, content in (("\n<|end|>{}42", "\n42"), ("4<|end|>\n{}2", "4\n\n\n2")):
        parser, text = ReasoningParser("", GPT_OSS), reply.format(message)
        parts = [part for at in range(0, len(text), step) for part in parser.feed(text[at : at + step])]
        assert joined([part for part in parts + parser.flush() if not part.mark], False) == content


def test_a_format_names_its_marks_and_what_ends_its_reasoning() -> None:
    assert GRANITE.marks == ("<think>", "</think>", "<response>", "</response>")
    assert COHERE.marks == ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    assert THINK.ending == "</think>" and COHERE.ending == "<|END_THINKING|><|START_RESPONSE|>"
    assert GPT_OSS.ending == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_model_without_marks_in_its_template_does_not_reason() -> None:
    assert THINK.reasons("a <think> b") and not THINK.reasons("a") and MISTRAL.reasons("[THINK]")


def test_the_format_of_a_tokenizer_is_that_of_its_template(tmp_path: Path) -> None:
    assert reasoning_format(make(tmp_path)) is THINK
    assert reasoning_format(make(tmp_path, SIMPLE + "{# [THINK] #}")) is MISTRAL
