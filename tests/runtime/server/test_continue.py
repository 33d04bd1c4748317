"""Test replies that continue the last assistant message: the text equals the uninterrupted reply."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.tokenizer.gguf_bpe import bpe_model
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served, joined
from tests.support.small_tokenizers import added

QUESTION = {"role": "user", "content": "What is the capital of Japan?"}


@pytest.mark.parametrize("begun", ["The", "The capital of", "The capital of Japan is Tokyo"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_message_is_continued(served: Served, begun: str, stream: bool) -> None:
    whole = joined(served.chat())[0]
    body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "content": begun}], "temperature": 0}
    chat = {**body, "continue_final_message": True, "add_generation_prompt": False, "stream": stream}
    assert begun + joined(served.ask("POST", "/v1/chat/completions", chat))[0] == whole
    if not stream:
        message = served.ask("POST", "/v1/messages", {**body, "max_tokens": 40}).json
        assert begun + message["content"][0]["text"] == whole
        counted = served.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"]
        usage = message["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def _sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer that writes a space before each text and removes it from decoded texts, as Llama 2's does."""
    space, names = "▁", ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {token: index for index, token in enumerate([*names, *letters, *(space + one for one in "abc")])}
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    plain = {"type": "Replace", "pattern": {"String": space}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    values = {
        "added_tokens": [added(index, name, special=True) for index, name in enumerate(names[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": space}, spaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": bpe_model(vocabulary, [[space, one] for one in "abc"], unk_token="<unk>", byte_fallback=True),
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}[/INST]"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    return Tokenizer.load(folder, 4096)


def test_a_continuation_begins_with_the_space_of_its_first_token(
    scripted: Scripted, loaded: LoadedModel, tmp_path: Path
) -> None:
    """The texts of prompt and reply, put together, are the text of all tokens."""
    model = replace(loaded, tokenizer=_sentencepiece_tokenizer(tmp_path))
    raw = {"prompt": "a", "raw": True, "stream": False, "model": "pico"}
    last = {"role": "assistant", "content": "a"}
    with scripted("b c", model=model) as served:  # its first token is "▁b"
        completed = served.ask("POST", "/v1/completions", {"prompt": "a", "echo": True})
        assert completed.json["choices"][0]["text"] == "a b c"
        assert served.ask("POST", "/completion", {"prompt": "a"}).json["content"] == " b c"
        assert served.ask("POST", "/api/generate", raw).json["response"] == " b c"
        continued = {"messages": [QUESTION, last], "continue_final_message": True}
        assert joined(served.ask("POST", "/v1/chat/completions", continued))[0] == " b c"
        assert joined(served.chat())[0] == "b c"  # an answer is a text of its own


def test_reasoning_before_the_message_stays_reasoning(scripted: Scripted, reasoning: LoadedModel) -> None:
    last = {"role": "assistant", "content": "It is ", "reasoning": "Think <|im_end|>."}
    body = {"model": "pico", "messages": [QUESTION, last], "continue_final_message": True}
    with scripted("Tokyo.", model=reasoning) as served:
        assert joined(served.ask("POST", "/v1/chat/completions", body))[0] == "Tokyo."
        prompt = served.service.worker.engine.prompts[-1]
        text = served.service.loaded.tokenizer.spelled(prompt)
        assert text.endswith("assistant\n<think>\nThink <|im_end|>.\n</think>\n\nIt is ")
        end = reasoning.tokenizer.encode("<|im_end|>", add_special=False, allow_special=True)
        assert prompt.count(end[0]) == 1  # the one after the question: control tokens spelled in a message are text


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [QUESTION], "continue_final_message": True},
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
        {"regex": "a+", "continue_final_message": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=["a-question", "alone", "with-a-format", "no-prompt", "both"],
)
def test_what_cannot_be_continued_is_refused(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [QUESTION, {"role": "assistant", "content": "The"}], **fields}
    answer = served.ask("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and answer.error["param"] in ("messages", "add_generation_prompt"), answer.body
