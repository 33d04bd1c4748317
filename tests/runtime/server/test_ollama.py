"""Test Ollama's interface with its own Python client, and requests that the client cannot send."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ollama
import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.ollama import card
from mycli.runtime.server.ollama.chat import _message
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.ollama.request import OllamaChatRequest, OllamaMessage, ollama_spec, read_options
from mycli.runtime.tokenizer.chat_template import Message
from tests.runtime.server.conftest import Scripted
from tests.support.embedding_models import qwen3_embedding
from tests.support.paths import ROOT
from tests.support.served import Served, load_fp32, serving

MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]
OPTIONS = {"temperature": 0, "num_predict": 12}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def client(served: Served) -> ollama.Client:
    return ollama.Client(host=served.url)


def lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.decode().splitlines()]


def test_chat_whole_streamed_and_generate_are_the_reply_of_the_other_interfaces(
    served: Served, client: ollama.Client
) -> None:
    expected = served.chat(max_tokens=12).json
    whole = client.chat("pico", MESSAGES, options=OPTIONS)
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert whole.done and whole.model == "pico"
    assert whole.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert whole.eval_count == expected["usage"]["completion_tokens"]
    assert whole.total_duration and whole.eval_duration and whole.total_duration >= whole.eval_duration
    parts = list(client.chat("pico:latest", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    generated = client.generate("pico", MESSAGES[0]["content"], options=OPTIONS)
    assert generated.response == whole.message.content
    raw = client.generate("pico", "Once upon", raw=True, options=OPTIONS)
    completed = served.ask("POST", "/v1/completions", {"prompt": "Once upon", "max_tokens": 12, "temperature": 0})
    assert raw.response == completed.json["choices"][0]["text"] and raw.done_reason == "length"


def test_the_time_of_the_prompt_ends_with_the_first_token(served: Served, client: ollama.Client) -> None:
    before = len(served.log)
    whole = client.chat("pico", MESSAGES, options=OPTIONS)
    assert served.logged(before + 1) and whole.prompt_eval_duration is not None
    assert f"TTFT {whole.prompt_eval_duration / 1e6:.0f} ms" in served.log[-1]


def test_formats(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
    reply = client.chat("pico", MESSAGES, format=schema, options={"temperature": 0, "num_predict": 64})
    assert isinstance(json.loads(reply.message.content or "")["size"], int)
    assert client.generate("pico", "An object", format="json", options=OPTIONS).response.startswith("{")


def test_lists_and_descriptions(client: ollama.Client, served: Served) -> None:
    assert [model.model for model in client.list().models] == ["pico", "alias/of-it"]
    (running,) = client.ps().models
    assert running.model == "pico" and running.context_length == 512
    shown = client.show("pico")
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048 and "messages" in (shown.template or "")
    assert shown.modelinfo["general.basename"] == "pico"  # the name that VS Code shows
    version = tuple(map(int, served.ask("GET", "/api/version").json["version"].split(".")))
    assert len(version) == 3 and version >= (0, 13, 4)  # codex --oss refuses older ones


def test_tools_are_called_and_their_results_are_read(reasoning: LoadedModel, scripted: Scripted) -> None:
    text = 'A moment.\n<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    with scripted(text, model=reasoning) as served:
        client = ollama.Client(host=served.url)
        whole = client.chat("pico", MESSAGES, tools=[WEATHER])
        streamed = list(client.chat("pico", MESSAGES, tools=[WEATHER], stream=True))
        for message in (whole.message, streamed[-2].message):
            assert message.tool_calls is not None
            (call,) = message.tool_calls
            assert (call.function.name, call.function.arguments) == ("look", {"at": "it"})
        # The text before a call is kept, whole as streamed.
        assert whole.message.content == "".join(part.message.content or "" for part in streamed) == "A moment."
        result = {"role": "tool", "content": "nothing", "tool_name": "look"}
        again = [*MESSAGES, whole.message.model_dump(exclude_none=True), result]
        assert client.chat("pico", again, tools=[WEATHER]).done
        prompt = reasoning.tokenizer.decode(list(served.service.worker.engine.prompts[-1]))  # type: ignore[attr-defined]  # the scripted engine
        assert "look:" in prompt and "nothing" in prompt


def test_the_template_gets_the_tool_and_the_call_of_a_result() -> None:
    result = OllamaMessage(role="tool", content="nothing", tool_name="look", tool_call_id="call-1")
    assert _message(result, "messages.0") == Message("tool", "nothing", name="look", tool_call_id="call-1")
    assert _message(OllamaMessage(role="tool"), "messages.0") == Message("tool", "")


@pytest.mark.parametrize(("think", "shown"), [(None, "a thought"), (True, "a thought"), (False, None)])
def test_thinking_is_a_field(reasoning: LoadedModel, scripted: Scripted, think: bool | None, shown: str | None) -> None:
    with scripted("<think>a thought</think>an answer", model=reasoning) as served:
        client = ollama.Client(host=served.url)
        reply = client.chat("pico", MESSAGES, think=think)
        assert reply.message.content == "an answer"
        assert (reply.message.thinking or None) == shown
        parts = list(client.generate("pico", "x", think=think, stream=True))
        assert "".join(part.thinking or "" for part in parts) == (shown or "")


@pytest.mark.parametrize(
    ("think", "arguments"),
    [
        (None, {}),
        ("", {}),
        (True, {"enable_thinking": True}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_think_is_an_argument_of_the_template(think: bool | str | None, arguments: dict[str, Any]) -> None:
    body = OllamaChatRequest.model_validate({"model": "pico", "messages": MESSAGES, "think": think})
    assert ollama_spec(body, [], read_options(body, 512)).arguments == arguments


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_030_261_248, "8.0B"), (10**9, "1.0B"), (134_515_008, "134.5M"), (9_950, "9.9K"), (999, "999")],
)
def test_the_number_of_parameters_has_a_unit(count: int, text: str) -> None:
    assert card._short(count) == text


def test_a_request_without_a_prompt_loads_or_unloads(client: ollama.Client) -> None:
    assert client.generate("pico").done_reason == "load"
    assert client.chat("pico", []).done_reason == "load"
    assert client.generate("pico", keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("generate", {"prompt": "a", "options": {"mirostat": 1}}, 400, "options.mirostat: is not supported"),
        ("generate", {"prompt": "a", "options": {"temperature": "hot"}}, 400, "options.temperature: must be a number"),
        (
            "generate",
            {"prompt": "a", "options": {"seed": -(1 << 63) - 1}},
            400,
            "options.seed: must be at least -92233",
        ),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: pico has no fill-in-the-middle tokens"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context: is not supported"),
        ("generate", {"prompt": "a", "images": ["AAAA"]}, 400, "images: is not supported"),
        ("generate", {"prompt": "a", "keep_alive": "soon"}, 400, "keep_alive: must be a number of seconds"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["A"]}]}, 400, "messages.0.images"),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "format": "xml"}, 400, "format: must be"),
        ("chat", {"model": "nosuch", "messages": [{"role": "user", "content": "a"}]}, 404, "nosuch"),
        ("chat", {"messages": [{"role": "user", "content": "a " * 3000}]}, 400, "context"),
        ("pull", {"model": "a"}, 403, "does not change the models"),
        ("create", {"model": "a"}, 403, "does not change the models"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = served.ask("POST", f"/api/{path}", {"model": "pico", **fields})
    assert answer.status == status
    assert set(answer.json) == {"error"} and words in answer.json["error"]


def test_options_of_placement_are_harmless_and_unknown_ones_are_named(served: Served) -> None:
    options = {**OPTIONS, "num_gpu": 99, "num_thread": 4, "typical_p": 1.0, "num_ctx": 1 << 20, "nosuch": 1}
    answer = served.ask("POST", "/api/generate", {"model": "pico", "prompt": "a", "options": options, "stream": False})
    assert answer.status == 200
    assert answer.headers["x-mycli-omitted"] == "option nosuch, option num_ctx above 512"


def test_whole_numbers_may_have_a_point(served: Served) -> None:
    """Home Assistant sends num_ctx as 8192.0."""
    options = {"num_ctx": 256.0, "num_predict": 2.0, "top_k": 40.0, "seed": 1.0}
    body = {"model": "pico", "messages": MESSAGES, "stream": False}
    answer = served.ask("POST", "/api/chat", {**body, "options": options})
    assert answer.status == 200 and answer.json["eval_count"] == 2, answer.body
    answer = served.ask("POST", "/api/chat", {**body, "options": {"num_ctx": 256.5}})
    assert answer.status == 400 and "options.num_ctx: must be an integer" in answer.json["error"]


def test_sampling_options_reach_the_sampler(served: Served) -> None:
    options = {"temperature": 1.5, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "num_predict": 24}
    body = {"model": "pico", "messages": MESSAGES, "options": {**options, "repeat_penalty": 1.2, "stop": ["\n"]}}
    ours = served.ask("POST", "/api/chat", {**body, "stream": False}).json["message"]["content"]
    renamed = {key: value for key, value in options.items() if key != "num_predict"}
    theirs = served.chat(**renamed, max_tokens=24, repetition_penalty=1.2, stop=["\n"]).json
    assert ours == theirs["choices"][0]["message"]["content"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_zero_is_none(served: Served, limit: int) -> None:
    body = {"model": "pico", "messages": MESSAGES, "options": {"num_predict": limit, "temperature": 0}}
    answer = served.ask("POST", "/api/chat", {**body, "stream": False}).json
    assert answer["done_reason"] == "stop" and answer["eval_count"] > 1


def test_a_temperature_above_two_is_sampled_with_here_and_refused_in_openais_interface(served: Served) -> None:
    body = {"model": "pico", "messages": MESSAGES, "stream": False}
    hot = {**body, "options": {"temperature": 2.5, "num_predict": 1}}
    assert served.ask("POST", "/api/chat", hot).status == 200
    sampling, _, _ = read_options(OllamaChatRequest.model_validate(hot), 2048)
    assert served.service.sampling(sampling).temperature == 2.5
    assert served.ask("POST", "/v1/chat/completions", {**body, "temperature": 2.5}).error["param"] == "temperature"
    answer = served.ask("POST", "/api/chat", {**body, "options": {"temperature": 101}})
    assert answer.status == 400 and "options.temperature: must be at most 100" in answer.json["error"]


@pytest.mark.parametrize("top", [2, None])
def test_logprobs(served: Served, top: int | None) -> None:
    body = {"model": "pico", "messages": MESSAGES, "options": OPTIONS, "logprobs": True, "top_logprobs": top}
    parts = lines(served.ask("POST", "/api/chat", body).body)
    listed = [entry for part in parts for entry in part.get("logprobs", [])]
    assert len(listed) == parts[-1]["eval_count"] > 0
    assert {len(entry.get("top_logprobs", ())) for entry in listed} == {top or 0}


def test_curl_without_a_content_type_is_served_and_a_page_is_not(served: Served) -> None:
    """The form content type is that of Ollama's curl examples; a cross-site form also sends its origin."""
    body = json.dumps({"model": "pico", "prompt": "a", "options": OPTIONS}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert served.ask("POST", "/api/generate", body, form).status == 200
    assert served.ask("POST", "/api/generate", body, {**form, "sec-fetch-site": "same-origin"}).status == 415
    assert served.ask("POST", "/api/generate", body, {"content-type": "text/plain;charset=UTF-8"}).status == 200
    assert served.ask("POST", "/api/generate", body, {"content-type": "multipart/form-data"}).status == 415
    assert served.ask("POST", "/v1/completions", body, form).status == 415


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(5, 5.0), ("10m", 600.0), ("1h30m", 5400.0), ("1.5s", 1.5), (0, 0.0), ("0", 0.0), (-1, None), ("-1m", None)],
)
def test_keep_alive(value: Any, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 parsecs", True, [], "1h-30m"])
def test_keep_alive_refuses(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds"):
        keep_alive_seconds(value)


def test_the_javascript_client(served: Served, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    loaded = load_fp32(qwen3_embedding(tmp_path / "embedder"))
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "ollama"]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {done.stderr[-200:]}")
    shutil.copy(ROOT / "tests/support/clients/ollama_client.mjs", tmp_path)
    with serving(*loaded, ServerSettings(("embedder",))) as embedder:
        ran = subprocess.run(
            ["node", "ollama_client.mjs", served.url, "pico", embedder.url, "embedder"],
            cwd=tmp_path,
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ran.stdout == "complete\n", ran.stderr
