"""Test completions between a prefix and a suffix, and llama.cpp's routes for code editors."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.routes.llama_cpp import LineReader
from mycli.runtime.server.routes.native_completion import _ids
from tests.support.fim_model import with_fim_tokens
from tests.support.served import Answer, ScriptedEngine, Served, serving

GAP = {"input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))"}
PROMPT = "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\nprint(add(1, 2))<|fim_middle|>"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def coder(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return with_fim_tokens(loaded, tmp_path_factory.mktemp("coder"))


@pytest.fixture(scope="module")
def coding(coder: LoadedModel) -> Iterator[Served]:
    with serving(coder, Engine(coder.runner, CacheShape.paged(512, 2048, 16), coder.vocabulary_size)) as served:
        yield served


def infill(served: Served, **fields: Any) -> Answer:
    return served.ask("POST", "/infill", {**GAP, "n_predict": 8, **GREEDY, **fields})


def continued(served: Served) -> str:
    """Return the reply to the same prompt, written out by the client."""
    ids = served.service.loaded.tokenizer.encode(PROMPT, add_special=False, allow_special=True)
    body = {"prompt": ids, "max_tokens": 8, **GREEDY}
    text: str = served.ask("POST", "/v1/completions", body).json["choices"][0]["text"]
    return text


def test_every_interface_completes_the_same_prompt(coding: Served) -> None:
    expected = continued(coding)
    assert expected
    body = {"prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"]}
    answer = coding.ask("POST", "/v1/completions", {**body, "max_tokens": 8, **GREEDY})
    assert answer.json["choices"][0]["text"] == expected, answer.body
    streamed = coding.ask("POST", "/v1/completions", {**body, "max_tokens": 8, **GREEDY, "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == expected
    options = {"num_predict": 8, **GREEDY}
    answer = coding.ask("POST", "/api/generate", {**body, "options": options, "stream": False})
    assert answer.json["response"] == expected
    lines = coding.ask("POST", "/api/generate", {**body, "options": options}).body.decode().splitlines()
    assert "".join(json.loads(line)["response"] for line in lines) == expected
    reply = infill(coding).json
    assert reply["content"] == expected and reply["prompt"] == PROMPT
    assert infill(coding, input_prefix="def add(", prompt="a, b):\n").json["content"] == expected


def test_an_infill_has_llama_cpps_fields(coding: Served) -> None:
    reply = infill(coding, return_tokens=True).json
    assert reply["stop"] is True and reply["stop_type"] == "limit" and reply["truncated"] is False
    assert reply["tokens_predicted"] == len(reply["tokens"]) == 8 == reply["timings"]["predicted_n"]
    assert reply["tokens_evaluated"] == reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] > 8
    assert reply["tokens_cached"] == reply["tokens_evaluated"] + 8
    events = infill(coding, stream=True, timings_per_token=True, return_progress=True).events
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == reply["content"] and not events[-1]["content"]
    assert events[-1]["tokens_predicted"] == 8 and any("prompt_progress" in event for event in events)
    assert b"[DONE]" not in infill(coding, stream=True).body


def test_a_request_of_an_editor_is_answered(coding: Served) -> None:
    """With the fields of llama.vim: for a completion, and to compute the extra text beforehand."""
    fields = ["content", "timings/predicted_n", "truncated", "none"]
    request = {"samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9, "cache_prompt": True, "id_slot": 0}
    request |= {"n_indent": 0, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "response_fields": fields}
    extra = [{"text": "x = 1\n", "filename": "x.py"}]
    answer = infill(coding, **request, input_extra=extra, temperature=None)
    assert (
        set(answer.json) == {"content", "timings/predicted_n", "truncated"} and answer.json["timings/predicted_n"] == 8
    )
    assert answer.headers["x-mycli-omitted"] == "sampler infill"
    assert answer.json == infill(coding, **request, input_extra=extra, temperature=None).json  # greedy
    warm = infill(coding, input_extra=extra, n_predict=0, samplers=[], response_fields=[""], t_max_predict_ms=1)
    assert warm.status == 200 and warm.json == {}
    prompt = infill(coding, input_extra=extra).json
    assert prompt["prompt"] == f"<|repo_name|>myproject\n<|file_sep|>x.py\nx = 1\n<|file_sep|>filename\n{PROMPT}"
    assert prompt["timings"]["cache_n"] > 0


def test_text_beyond_the_context_is_cut_far_from_the_gap(coding: Served) -> None:
    far = " far" * 3000
    reply = infill(coding, input_prefix=far + " near(", input_suffix=")next" + far)
    assert reply.status == 200 and reply.json["truncated"] and reply.json["tokens_predicted"] == 8
    assert reply.headers["x-mycli-omitted"] == "text beyond the context"
    assert " near(<|fim_suffix|>)next" in reply.json["prompt"] and reply.json["tokens_evaluated"] == 504
    assert infill(coding, input_prefix=far, n_predict=-1, ignore_eos=True).json["tokens_predicted"] == 129
    refused = coding.ask("POST", "/v1/completions", {"prompt": far, "suffix": "x"})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/infill", "/v1/completions", "/api/generate"])
def test_marks_of_files_end_a_completion(coder: LoadedModel, path: str) -> None:
    file, ends = coder.tokenizer.vocabulary.index("<|file_sep|>"), list[frozenset[int]]()

    def script(request: Request) -> list[int]:
        ends.append(request.stop_ids)
        return [5]

    with serving(coder, ScriptedEngine(script)) as served:
        body = GAP if path == "/infill" else {"prompt": "a", "suffix": "b"}
        for more in ({}, {"ignore_eos": True}):
            assert served.ask("POST", path, {**body, **more}).status == 200
        answer = served.ask("POST", "/completion", {"prompt": "a"})
        assert answer.status == 200 and answer.json["timings"]["cache_n"] == 0
    assert file in ends[0] and coder.stop_ids < ends[0] and ends[2] == coder.stop_ids
    assert ends[1] == (ends[0] if path == "/api/generate" else frozenset())  # which has no such field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", GAP, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_a_model_without_marks_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = served.ask("POST", path, body)
    assert answer.status == 400 and answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: pico has no fill-in-the-middle tokens")
    assert "pico has no" in served.ask("POST", "/api/generate", {"prompt": "a", "suffix": "b"}).json["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**GAP, "input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ("/infill", {**GAP, "mirostat": 1}, "mirostat"),
        ("/v1/completions", {"prompt": [5, 6], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [5, [6]]}, "prompt"),
        ("/completion", {"prompt": ["a"] * 65}, "prompt"),
        ("/completion", {"prompt": [["a", 1 << 30]]}, "prompt"),
        ("/completion", {"prompt": "a", "n_probs": 21}, "n_probs"),
    ],
)
def test_a_wrong_request_is_refused_by_field(coding: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = coding.ask("POST", path, body)
    assert answer.status == 400 and answer.error["param"] == param, answer.body


def test_native_completion_continues_text_and_ids(coding: Served) -> None:
    chat = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    ids = coding.service.loaded.tokenizer.encode(chat, add_special=False, allow_special=True)
    body = {"prompt": ids, "max_tokens": 8, **GREEDY}
    expected = coding.ask("POST", "/v1/completions", body).json["choices"][0]
    for prompt in (chat, ids):
        reply = coding.ask("POST", "/completion", {"prompt": prompt, "n_predict": 8, **GREEDY}).json
        assert reply["content"] == expected["text"] and reply["prompt"] == chat
    stop = expected["text"][2:5]
    reply = coding.ask("POST", "/completion", {"prompt": chat, "n_predict": 8, "stop": [stop], **GREEDY}).json
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", stop) and stop not in reply["content"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a", [("a", True)]), (["a", 2, "b"], [("a", True), ("b", False)]), ([2, "a"], [("a", False)])],
    ids=["text", "text-first", "id-first"],
)
def test_only_the_beginning_of_a_prompt_gets_special_tokens(prompt: Any, texts: list[tuple[str, bool]]) -> None:
    encoded = []

    def text_prompt(text: str, add_special: bool, allow_special: bool) -> list[int]:
        encoded.append((text, add_special))
        return [9]

    service: Any = SimpleNamespace(text_prompt=text_prompt, check_ids=lambda ids, field: None)
    assert _ids(service, prompt) == [9 if isinstance(part, str) else part for part in prompt]
    assert encoded == texts


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_continued_in_one_request(coding: Served, stream: bool) -> None:
    """Each reply is that to its prompt alone, with the fields of llama.cpp; a list with a token id is one prompt."""
    ids = coding.service.loaded.tokenizer.encode("def add", add_special=False)
    prompts: list[Any] = ["import os\n", [*ids], ["def ", *ids[-1:], "(x):"]]
    options = {"n_predict": 6, "n_probs": 2, "return_tokens": True, **GREEDY}
    alone = [coding.ask("POST", "/completion", {"prompt": [prompt], **options}).json for prompt in prompts]
    assert alone[2] == {**coding.ask("POST", "/completion", {"prompt": prompts[2], **options}).json, **_times(alone[2])}
    answer = coding.ask("POST", "/completion", {"prompt": prompts, "stream": stream, **options})
    if not stream:
        replies = answer.json
    else:
        replies = [reply for reply in answer.events if reply["stop"]]
        for reply in replies:
            parts = [part for part in answer.events if part["index"] == reply["index"] and not part["stop"]]
            for name in ("content", "tokens", "completion_probabilities"):
                reply[name] = type(parts[0][name])() if name != "content" else ""
                for part in parts:
                    reply[name] += part[name]
    assert sorted(reply["index"] for reply in replies) == [0, 1, 2]
    for reply in replies:
        expected = {**alone[reply["index"]], "index": reply["index"], **_times(reply)}
        expected["generation_settings"]["stream"] = stream
        assert reply == expected
        assert len(reply["completion_probabilities"]) == reply["tokens_predicted"] == 6
        for entry, token in zip(reply["completion_probabilities"], reply["tokens"], strict=True):
            assert entry["id"] == token and [top["id"] for top in entry["top_logprobs"]][0] == token
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] < 0 and len(entry["top_logprobs"]) == 2


def _times(reply: dict[str, Any]) -> dict[str, Any]:
    return {"timings": reply["timings"]}


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_those_of_the_reply(coder: LoadedModel, stream: bool) -> None:
    with serving(coder, ScriptedEngine(lambda _: [5] * 6, pause=0.02)) as served:
        answer = served.ask("POST", "/infill", {**GAP, "stream": stream})
        timings = (answer.events[-1] if stream else answer.json)["timings"]
    assert timings["prompt_ms"] > 15 and timings["predicted_ms"] > 60


def test_props_describe_the_model(coding: Served) -> None:
    described = coding.ask("GET", "/props").json
    assert described["default_generation_settings"]["n_ctx"] == 512 and described["eos_token"] == "<|im_end|>"
    assert described["chat_template"] == coding.service._template
    assert described["total_slots"] == coding.service.worker.engine.scheduler.limits.running
    assert described["modalities"] == {"vision": False, "audio": False}, "clients would send images"
    assert not described["is_sleeping"] and described["model_alias"] == described["model_path"] == coding.service.name


def test_ollamas_description_says_which_models_fill_in(coding: Served, served: Served) -> None:
    assert "insert" in coding.ask("POST", "/api/show", {"model": "pico"}).json["capabilities"]
    assert "insert" not in served.ask("POST", "/api/show", {"model": "pico"}).json["capabilities"]


LINES = "    a\n        b\n  c\n    d"


@pytest.mark.parametrize(
    ("indent", "kept"), [(4, "    a\n        b\n"), (2, LINES), (5, "    a\n        b\n"), (9, "    a\n")]
)
def test_a_line_with_less_indentation_ends_the_reply(loaded: LoadedModel, indent: int, kept: str) -> None:
    """However many tokens a step has."""
    ids = loaded.tokenizer.encode(LINES, add_special=False)
    for size in (1, 3, len(ids)):
        reader = LineReader(ReplyReader(loaded.tokenizer), indent, None)
        text, end = read(reader, ids, size)
        assert text == kept and end == ("length" if kept != LINES else "stop")


def read(reader: LineReader, ids: list[int], size: int, wait: Callable[[], None] = lambda: None) -> tuple[str, Any]:
    text = ""
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        output = SequenceOutput(1, tuple(ids[start : start + size]), finish_reason="stop" if last else None)
        piece = reader.feed(output)
        text += piece.content
        if piece.end is not None:
            return text, piece.end
        wait()
    raise AssertionError("the reply has no end")


def test_the_first_line_end_after_the_time_ends_the_reply(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mycli.runtime.server.routes.llama_cpp.time.perf_counter", lambda: now[0])
    ids = loaded.tokenizer.encode("a b c\nd e f\ng", add_special=False)

    def wait(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    for seconds, kept in ((0.0, "a b c\nd e f\ng"), (1.0, "a b c\n")):
        reader = LineReader(ReplyReader(loaded.tokenizer), 0, 0.5)
        assert read(reader, ids, 1, wait(seconds))[0] == kept
