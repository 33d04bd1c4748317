"""Test text generation with pico: stop strings, the union of end tokens, and warnings about the model's files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.stream import TextRules
from tests.support.engines import contiguous_engine
from tests.support.models import CPU
from tests.support.paths import PICO

STORY = [Message("user", "Tell me a story.")]


@pytest.fixture(scope="module")
def pico() -> LoadedModel:
    return LoadedModel.load(open_model_folder(PICO), CPU)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "pico"
    shutil.copytree(PICO, folder)
    return folder


def reply(
    loaded: LoadedModel,
    messages: list[Message],
    engine: Engine | None = None,
    *,
    limit: int | None = None,
    stops: tuple[str, ...] = (),
) -> Completion:
    prompt = loaded.tokenizer.apply_chat_template(messages)
    request = Request(tuple(prompt), limit=limit, stop_ids=loaded.stop_ids)
    reader = ReplyReader(loaded.tokenizer, TextRules(stops))
    return Completion(engine or contiguous_engine(loaded.runner, 256), request, reader)


def test_streamed_text_is_the_text_of_the_tokens(pico: LoadedModel) -> None:
    answer = reply(pico, STORY)
    pieces = list(answer)
    assert all(pieces) and "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == pico.tokenizer.decode(answer.tokens)
    assert answer.finish_reason == "stop" and answer.timing.generated == len(answer.tokens) + 1


def test_a_stop_string_across_tokens_is_never_shown(pico: LoadedModel) -> None:
    whole = "".join(reply(pico, STORY))
    stop = whole[20:33]
    answer = reply(pico, STORY, stops=(stop,))
    assert "".join(answer) == whole[: whole.index(stop)] and answer.finish_reason == "stop"
    never = reply(pico, STORY, stops=(whole[-6:] + "!",))
    assert "".join(never) == whole, "the beginning of a stop at the end of a reply is shown after all"


def test_the_end_of_the_limit_and_of_the_context(pico: LoadedModel) -> None:
    short = reply(pico, STORY, limit=5)
    list(short)
    assert (short.finish_reason, len(short.tokens)) == ("length", 5)
    prompt = pico.tokenizer.apply_chat_template(STORY)
    full = reply(pico, STORY, contiguous_engine(pico.runner, len(prompt) + 6))
    list(full)
    assert (full.finish_reason, len(full.tokens)) == ("context", 7), "the last token needs no place in the cache"
    with pytest.raises(UsageError, match=f"{len(prompt)} prompt tokens and 500 more"):
        list(reply(pico, STORY, limit=500))


def test_a_consumer_that_leaves_does_not_spoil_the_engine(pico: LoadedModel) -> None:
    engine = contiguous_engine(pico.runner, 256)
    stream = iter(reply(pico, STORY, engine))
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert "".join(reply(pico, STORY, engine)) == "".join(reply(pico, STORY))


def test_every_source_of_end_tokens_counts(copy: Path) -> None:
    """The end tokens are the union of generation_config, config and tokenizer."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 300}))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": [301, 302]}))
    assert LoadedModel.load(open_model_folder(copy), CPU).stop_ids == {300, 301, 302, 2}


def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to(copy: Path) -> None:
    """A32: the tied embedding is used, and a warning is shown."""
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, copy / "model.safetensors")
    assert LoadedModel.load(open_model_folder(copy), CPU).warnings == ()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, copy / "model.safetensors")
    loaded = LoadedModel.load(open_model_folder(copy), CPU)
    assert any("lm_head" in warning for warning in loaded.warnings)
    assert "".join(reply(loaded, [Message("user", "What is the capital of Japan?")])).endswith("Tokyo.")


def test_weights_that_are_no_numbers(copy: Path) -> None:
    """A26: refused naming the tensor; if loaded on request, generation ends with an error (F5)."""
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj"):
        LoadedModel.load(open_model_folder(copy), CPU)
    with pytest.raises(ModelError, match="not a number"):
        list(reply(LoadedModel.load(open_model_folder(copy), CPU, allow_nonfinite=True), STORY))
