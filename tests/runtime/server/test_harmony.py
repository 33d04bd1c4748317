"""Test replies in the channels of gpt-oss."""

import dataclasses
import json

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.tokenizer.parsing.reasoning_parser import reasoning_format
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.runtime.server.conftest import Scripted
from tests.support.paths import PICO
from tests.support.served import ScriptedEngine, joined, serving
from tests.support.small_tokenizers import added

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")


HARMONY_TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{# <|channel|>analysis, <|channel|>commentary to=functions.f #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def gpt_oss(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return pico with the control tokens of gpt-oss and a template that has its marks."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    values = json.loads((PICO / "tokenizer.json").read_text())
    values["added_tokens"] += [added(4096 + index, name, special=True) for index, name in enumerate(HARMONY)]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    settings = json.loads((PICO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": HARMONY_TEMPLATE}))
    return dataclasses.replace(loaded, tokenizer=Tokenizer.load(folder, 4200))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_channels_of_gpt_oss(scripted: Scripted, gpt_oss: LoadedModel, stream: bool) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    with scripted(f"{thought}<|channel|>final<|message|>Four<|return|>", model=gpt_oss) as served:
        assert joined(served.chat("Go", stream=stream)) == ("Four", "Hm.", [], "stop")
        assert joined(served.chat("Go", stream=stream, tools=[TOOL])) == ("Four", "Hm.", [], "stop")
    call = 'commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    with scripted(f"{thought}<|channel|>{call}", model=gpt_oss) as served:
        assert joined(served.chat("Go", stream=stream, tools=[TOOL])) == ("", "Hm.", [("f", '{"a": 1}')], "tool_calls")


def test_a_terminal_is_shown_the_marks(gpt_oss: LoadedModel) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four"
    ids = tuple(gpt_oss.tokenizer.encode(text, add_special=False, allow_special=True))
    marks = reasoning_format(gpt_oss.tokenizer).marks
    shown = ReplyReader(gpt_oss.tokenizer, shown=marks).feed(SequenceOutput(1, ids, (), (), "stop")).content
    hidden = ReplyReader(gpt_oss.tokenizer).feed(SequenceOutput(1, ids, (), (), "stop")).content
    assert (shown, hidden) == (text, "analysisHm.assistantfinalFour")


def test_a_reply_of_gpt_oss_is_continued_in_its_channel(scripted: Scripted, gpt_oss: LoadedModel) -> None:
    engine = ScriptedEngine(lambda _: gpt_oss.tokenizer.encode(" five", add_special=False))
    prompts = []
    with serving(gpt_oss, engine) as served:
        for begun in ({"content": "Four,"}, {"content": "Four,", "reasoning": "Hm."}):
            messages = [{"role": "user", "content": "Go"}, {"role": "assistant", **begun}]
            body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            assert served.ask("POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"] == " five"
            ids = engine.prompts[-1]
            prompts.append(b"".join(map(gpt_oss.tokenizer.token_bytes, ids)).decode().split("Go<|end|>")[1])
    assert prompts == [
        "<|start|>assistant<|channel|>final<|message|>Four,",
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four,",
    ]
