"""Test `mycli embed`: texts from files and pipes, vectors as JSON lines and .npy."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import UsageError
from mycli.runtime.layers.bidirectional import encode_texts
from mycli.runtime.open import open_model
from tests.support.command_line import Mycli
from tests.support.embedding_models import (
    PROMPTS,
    cross_encoder,
    embedding_gemma,
    encoder,
    qwen3_embedding,
    qwen3_reranker,
)
from tests.support.models import CPU

TEXTS = ["Hello there", "What is the capital?", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_embedding(tmp_path_factory.mktemp("models") / "qwen3")


def embedded(stdout: str) -> numpy.ndarray:
    records = [json.loads(line) for line in stdout.splitlines()]
    assert [record["index"] for record in records] == list(range(len(records)))
    return numpy.array([record["embedding"] for record in records], "f4")


def test_files_and_pipes_give_the_same_vectors(mycli: Mycli, model: Path, tmp_path: Path) -> None:
    common = ("embed", str(model), "--device", "cpu", "--dtype", "fp32")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    piped = mycli(*common, input="\n".join(TEXTS))
    assert piped.returncode == 0, piped.stderr
    vectors = embedded(piped.stdout)
    assert vectors.shape == (3, 64) and (embedded(mycli(*common, str(tmp_path / "b.jsonl")).stdout) == vectors).all()
    out = tmp_path / "vectors.npy"
    assert mycli(*common, str(tmp_path / "a.txt"), "-o", str(out)).returncode == 0
    assert (numpy.load(out, allow_pickle=False) == vectors).all()
    prompted = mycli(*common, "--prompt", "query", input=TEXTS[0])
    spelled = mycli(*common, input=f"{PROMPTS['query']}{TEXTS[0]}".replace("\n", " "))
    assert prompted.returncode == 0 and embedded(prompted.stdout).shape == embedded(spelled.stdout).shape
    cut = embedded(mycli(*common, "--dimensions", "8", input=TEXTS[0]).stdout)
    assert cut.shape == (1, 8)


def test_a_byte_order_mark_is_no_part_of_the_first_text(mycli: Mycli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfHello there\n")
    command = ("embed", str(model), "--device", "cpu")
    plain = mycli(*command, input="Hello there\n")
    assert plain.returncode == 0, plain.stderr
    assert mycli(*command, str(tmp_path / "marked.txt")).stdout == plain.stdout
    assert mycli(*command, input="\ufeffHello there\n").stdout == plain.stdout


def test_empty_input_is_about_texts_not_about_a_prompt(mycli: Mycli, model: Path) -> None:
    for text in ("", " \n"):
        refused = mycli("embed", str(model), "--device", "cpu", input=text)
        assert refused.returncode == 2 and "standard input is empty\nhint: write one text a line" in refused.stderr


@pytest.mark.parametrize(
    ("write", "kind", "text"),
    [
        (encoder, "embedding", "embeddings of 64 values, cls pooling, normalized (mycli embed)"),
        (cross_encoder, "reranker", "score of a pair of texts: 0 to 1 (sigmoid)"),
        (qwen3_reranker, "reranker", 'probability of "yes" against "no"'),
    ],
    ids=["encoder", "head", "answer"],
)
def test_show_names_the_task(mycli: Mycli, tmp_path: Path, write: Callable[[Path], Path], kind: str, text: str) -> None:
    folder = str(write(tmp_path / "model"))
    assert json.loads(mycli("show", folder, "--json").stdout)["task"] == kind
    assert text in " ".join(mycli("show", folder).stdout.split())
    if kind == "embedding":
        assert "mycli run" not in mycli("show", folder, "--template").stderr


def test_a_text_that_is_too_long_for_the_model_is_refused_with_its_line(
    mycli: Mycli, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(model, folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    refused = mycli("embed", str(folder), "--device", "cpu", input="a " * 7 + "\n" + "a " * 8)
    assert refused.returncode == 2 and "text 2: 9 tokens; the model embeds at most 8" in refused.stderr


def test_a_bidirectional_model_embeds_and_does_not_generate(mycli: Mycli, tmp_path: Path) -> None:
    folder = embedding_gemma(tmp_path / "gemma")
    with open_model(folder, EngineConfig(device="cpu"), offline=True) as opened:
        opened.engine.submit(Request((1, 2), limit=0, hidden_states="all"))
        assert opened.engine.stats.waiting == 1
    done = mycli("embed", str(folder), "--device", "cpu", input="Hello")
    assert done.returncode == 0 and abs(numpy.linalg.norm(embedded(done.stdout)) - 1) < 1e-5
    refused = mycli("run", str(folder), "Hello", "--device", "cpu")
    assert refused.returncode == 2 and "computes embeddings" in refused.stderr


@pytest.mark.parametrize("arguments", [("chat",), ("eval", "--tokens", "1k"), ("eval", "--kv-sweep")], ids=" ".join)
def test_an_encoder_neither_chats_nor_has_a_perplexity(
    mycli: Mycli, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    command, *rest = arguments
    refused = mycli(command, str(encoder(tmp_path / "bert")), *rest, "--device", "cpu", input="Hello")
    assert refused.returncode == 2 and refused.stdout == ""
    assert "computes embeddings" in refused.stderr and "mycli embed" in refused.stderr


@pytest.mark.parametrize("command", ["run", "embed", "bench"])
def test_a_reranker_names_its_route(mycli: Mycli, tmp_path: Path, command: str) -> None:
    folder = cross_encoder(tmp_path / "bert")
    texts = ("Hello",) if command == "run" else ()
    refused = mycli(command, str(folder), *texts, "--device", "cpu", input="Hello")
    assert refused.returncode in (2, 3) and "scores pairs of texts" in refused.stderr, refused.stderr
    assert f"mycli serve {folder}; " in refused.stderr and "POST /v1/rerank" in refused.stderr


def test_a_quantized_reranker_keeps_its_head(mycli: Mycli, tmp_path: Path) -> None:
    folder, target = cross_encoder(tmp_path / "bert"), tmp_path / "quantized"
    flags = ("--bits", "8", "--method", "rtn", "--group", "32", "--report", "none", "-q")
    made = mycli("quantize", str(folder), *flags, "-o", str(target))
    assert made.returncode == 0, made.stderr
    scores = []
    for path in (folder, target):
        loaded = LoadedModel.load(open_model_folder(path), CPU)
        assert loaded.cross_encoder is not None
        request = loaded.cross_encoder.request(loaded.tokenizer.encode_pair("a", "the cat"))
        states = encode_texts(loaded.runner.model, [request.prompt], loaded.runner.rope(64), [request.token_types])
        scores.append(float(loaded.cross_encoder.score(states[0])))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3) and scores[0] != scores[1]


@pytest.mark.parametrize(
    ("arguments", "text", "code", "words"),
    [
        ((), "a\n\nb", 2, "line 2 is empty"),
        ((), "a " * 600, 2, "text 1: the prompt has"),
        (("--prompt", "nosuch"), "a", 2, "it has: query, document"),
        (("--dimensions", "65"), "a", 2, "65 dimensions: the vectors of this model have 64 values"),
        (("-o", "vectors.txt"), "a", 2, "not a .npy file"),
    ],
)
def test_mistakes_are_named(
    mycli: Mycli, model: Path, arguments: tuple[str, ...], text: str, code: int, words: str
) -> None:
    done = mycli("embed", str(model), "--device", "cpu", *arguments, input=text)
    assert done.returncode == code and words in done.stderr, done.stderr


def test_a_text_in_place_of_a_file_is_shown_the_pipe(mycli: Mycli) -> None:
    done = mycli("embed", "pico", "Hello there")
    assert done.returncode == 4 and "Hello there: no such file" in done.stderr
    assert "echo TEXT | mycli embed MODEL" in done.stderr


def test_a_generative_model_is_refused(mycli: Mycli) -> None:
    done = mycli("embed", "pico", "--device", "cpu", input="a")
    assert done.returncode == 3 and "computes no embeddings" in done.stderr and "mycli embed" in done.stderr


def test_texts_of_several_batches_are_numbered_through(
    mycli: Mycli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("embed", str(model), "--device", "cpu", "--dtype", "fp32")
    texts = [*TEXTS, "Good night", "The end"]
    whole = embedded(mycli(*common, input="\n".join(texts)).stdout)
    monkeypatch.setattr(sys.modules["mycli.cli.commands.embed"], "_TOGETHER", 2)
    assert numpy.allclose(embedded(mycli(*common, input="\n".join(texts)).stdout), whole, atol=1e-5)
    refused = mycli(*common, input="\n".join([*texts[:4], "a " * 600]))
    assert refused.returncode == 2 and "text 5: the prompt has" in refused.stderr


def test_the_end_token_of_the_settings_follows_every_text(tmp_path: Path) -> None:
    """As of E5-Mistral and gte-Qwen2, whose tokenizer.json does not add it."""
    folder = qwen3_embedding(tmp_path / "qwen3")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_eos_token": True}))
    with open_model(folder, EngineConfig(device="cpu", dtype="float32"), offline=True) as opened:
        ids = [*opened.tokenizer.encode("Hello there", add_special=True), 2]
        state = opened.model.runner.hidden_states(ids)[-1]
        expected = torch.nn.functional.normalize(state.float(), dim=0)
        assert opened.embed(["Hello there"])[0] == pytest.approx(expected, abs=1e-6)


def test_a_refused_text_leaves_no_others_in_the_engine(model: Path) -> None:
    with open_model(str(model), EngineConfig(device="cpu", context=64), offline=True) as opened:
        expected = opened.embed(["a b"])
        with pytest.raises(UsageError, match="text 2: the prompt has"):
            opened.embed(["Hello", "a " * 100])
        assert torch.equal(opened.embed(["a b"]), expected)


def test_a_text_has_hidden_states_up_to_the_context(model: Path) -> None:
    with open_model(str(model), EngineConfig(device="cpu", context=64), offline=True) as opened:
        assert len(opened.hidden_states("a b")) == len(opened.tokenizer.encode("a b", add_special=True))
        with pytest.raises(UsageError, match="the context holds 1 to 64"):
            opened.hidden_states("a " * 100)


@pytest.mark.parametrize(
    ("text", "problem"), [('"a"\n{"text": 1}\n', "line 2: no text"), ('"a"\n\n', "line 2: not valid JSON")]
)
def test_a_line_without_a_text_is_named(mycli: Mycli, model: Path, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    done = mycli("embed", str(model), str(tmp_path / "a.jsonl"), "--device", "cpu")
    assert done.returncode == 2 and problem in done.stderr


def test_a_bidirectional_model_is_quantized_without_data(mycli: Mycli, tmp_path: Path) -> None:
    folder, target = embedding_gemma(tmp_path / "gemma"), tmp_path / "quantized"
    flags = ("quantize", str(folder), "--bits", "8", "--group", "32", "-q", "-o", str(target))
    for more in ((), ("--method", "rtn")):
        refused = mycli(*flags, *more)
        assert refused.returncode == 2 and "a --method without data, and add --report none" in refused.stderr
    assert mycli(*flags, "--method", "rtn", "--report", "none").returncode == 0
    assert mycli("embed", str(target), "--device", "cpu", input="Hello").returncode == 0


def test_a_quantized_model_embeds(mycli: Mycli, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    flags = ("--bits", "8", "--method", "rtn", "--group", "32", "--report", "none", "-q")
    made = mycli("quantize", str(model), *flags, "-o", str(target))
    assert made.returncode == 0, made.stderr
    files = json.loads((target / "mycli.json").read_text())["files"]
    assert "1_Pooling/config.json" in files and mycli("verify", str(target)).returncode == 0
    common = ("embed", "--device", "cpu", "--dtype", "fp32")
    original, copy = (embedded(mycli(*common, str(path), input=TEXTS[1]).stdout)[0] for path in (model, target))
    assert original @ copy > 0.98 * numpy.linalg.norm(original) * numpy.linalg.norm(copy)
    assert mycli("quantize", str(model), *flags, "-o", str(target), "--overwrite").returncode == 0
