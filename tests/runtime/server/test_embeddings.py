"""Test embeddings and reranking over HTTP: equal to transformers, with the same bits alone and in a batch."""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy
import ollama
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from mycli.runtime.engine.loading import loader
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.errors import UserError
from mycli.runtime.server.embedding import VectorReader
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.routes.rerank import _AFTER, _BEFORE, INSTRUCTION
from tests.support.embedding_models import (
    PROMPTS,
    WORD_PIECES,
    embedding_gemma,
    encoder,
    llama_bidirectional,
    qwen3_embedding,
    qwen3_reranker,
)
from tests.support.served import Served, load_fp32, serving

TEXTS = ["Hello there", "The capital of Japan is Tokyo, and it is a large city. " * 6, "x", "What is the capital?"]
MAKERS = {"qwen3": qwen3_embedding, "gemma3": embedding_gemma, "reranker": qwen3_reranker}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("embedding")
    return {name: make(base / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    with (
        serving(*load_fp32(folders["qwen3"]), ServerSettings(("qwen3",))) as qwen3,
        serving(*load_fp32(folders["gemma3"]), ServerSettings(("gemma3",))) as gemma3,
        serving(*load_fp32(folders["reranker"]), ServerSettings(("reranker",))) as reranker,
    ):
        yield {"qwen3": qwen3, "gemma3": gemma3, "reranker": reranker}


@torch.no_grad()
def reference(folder: Path, name: str, ids: list[int]) -> torch.Tensor:
    states = AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).last_hidden_state[0]
    x = states[-1] if name == "qwen3" else states[0] if name == "encoder" else states.mean(0)
    if name == "gemma3":
        from safetensors.torch import load_file

        for path in ("2_Dense", "3_Dense"):
            x = load_file(folder / path / "model.safetensors")["linear.weight"] @ x
    return torch.nn.functional.normalize(x, dim=0)


def vectors(served: Served, texts: list[str], **fields: object) -> numpy.ndarray:
    answer = served.ask("POST", "/v1/embeddings", {"input": texts, "encoding_format": "base64", **fields})
    assert answer.status == 200, (answer.body, served.log)
    return numpy.stack([numpy.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer.json["data"]])


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_vectors_are_those_of_the_definition_and_have_the_same_bits(
    servers: dict[str, Served], folders: dict[str, Path], name: str
) -> None:
    served = servers[name]
    batched = vectors(served, TEXTS)
    tokenizer = served.service.loaded.tokenizer
    for text, vector in zip(TEXTS, batched, strict=True):
        expected = reference(folders[name], name, tokenizer.encode(text, add_special=True)).numpy()
        assert abs(vector - expected).max() < 1e-5
    hits = served.service.worker.stats.prefix_hits
    alone = numpy.concatenate([vectors(served, [text]) for text in TEXTS])
    assert (alone == batched).all(), "alone and, with a causal model, after a prefix hit"
    assert name == "gemma3" or served.service.worker.stats.prefix_hits > hits
    many = vectors(served, TEXTS * 20)
    assert (many == numpy.concatenate([batched] * 20)).all(), "more texts than run at a time"


def test_llama_with_bidirectional_attention(tmp_path: Path) -> None:
    """transformers computes it as Llama with is_causal = false; published files name a type of their own."""
    folder, ids = llama_bidirectional(tmp_path / "model"), list(range(5, 45))
    expected = reference(folder, "llama", ids).numpy()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "llama_bidirec", "pooling": "avg"}))
    with serving(*load_fp32(folder), ServerSettings(("llama",))) as served:
        assert abs(vectors(served, ids) - expected).max() < 1e-5  # type: ignore[arg-type]  # one text as ids


def test_bert_with_word_pieces(tmp_path: Path) -> None:
    """An unknown character and the spelling of a control token are parts of a text like others."""
    folder = encoder(tmp_path / "model")
    texts = ["The cat sat, what?", "[SEP] inside ж", "x"]
    library = AutoTokenizer.from_pretrained(folder)
    with serving(*load_fp32(folder), ServerSettings(("bert",))) as served:
        tokenizer = served.service.loaded.tokenizer
        ids = [tokenizer.encode(text, add_special=True) for text in texts]
        assert ids[0] == library(texts[0])["input_ids"] and ids[1].count(WORD_PIECES.index("[SEP]")) == 1
        batched = vectors(served, texts)
        for index, text in enumerate(texts):
            assert abs(batched[index] - reference(folder, "encoder", ids[index]).numpy()).max() < 1e-5
            assert (vectors(served, [text])[0] == batched[index]).all()
        assert not served.service.loaded.warnings


def test_openai_and_ollama_clients(servers: dict[str, Served]) -> None:
    served = servers["qwen3"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any")
    reply = client.embeddings.create(model="qwen3", input=TEXTS)
    expected = vectors(served, TEXTS)
    assert numpy.array_equal(numpy.array([entry.embedding for entry in reply.data], "f4"), expected)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    embedded = ollama.Client(host=served.url).embed("qwen3", TEXTS)
    assert numpy.array_equal(numpy.array(embedded.embeddings, "f4"), expected)
    older = ollama.Client(host=served.url).embeddings("qwen3", TEXTS[0])
    assert numpy.array_equal(numpy.array(older.embedding, "f4"), expected[0])


def test_an_empty_input_loads_a_model_of_ollamas_interface(servers: dict[str, Served]) -> None:
    client = ollama.Client(host=servers["qwen3"].url)
    assert client.embed("qwen3").embeddings == [] and client.embeddings("qwen3").embedding == []


def test_token_ids_prompts_and_dimensions(servers: dict[str, Served]) -> None:
    served = servers["qwen3"]
    ids = served.service.loaded.tokenizer.encode(TEXTS[0], add_special=True)
    assert (vectors(served, ids) == vectors(served, [TEXTS[0]])).all()  # type: ignore[arg-type]  # one text as ids
    prompted = vectors(served, [PROMPTS["query"] + TEXTS[0]])
    assert (vectors(served, [TEXTS[0]], prompt_name="query") == prompted).all()
    assert (vectors(served, [TEXTS[0]], input_type="query") == prompted).all()
    short = vectors(served, [TEXTS[0]], dimensions=16)[0]
    assert short.shape == (16,) and abs(numpy.linalg.norm(short) - 1) < 1e-6


def test_the_vocabulary_is_not_counted_for_every_text(
    servers: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting 250,000 tokens takes 10 ms, and langchain-openai sends 1,000 texts as token ids."""
    counted = list[int]()
    monkeypatch.setattr(loader, "_vocabulary_size", lambda _: counted.append(1) or 5000)
    served = servers["qwen3"]
    assert len(vectors(served, [[1, 2]] * 20)) == 20  # type: ignore[list-item]  # texts as ids
    assert len(counted) <= 1


@pytest.mark.parametrize(
    ("name", "path", "body", "words"),
    [
        ("qwen3", "embeddings", {"input": TEXTS, "dimensions": 65}, "the vectors of this model have 64 values"),
        ("qwen3", "embeddings", {"input": []}, "must have 1 or more items"),
        ("qwen3", "embeddings", {"input": "a " * 600}, "maximum context length"),
        ("qwen3", "embeddings", {"input": [5000]}, "token id 5000 is out of range"),
        ("qwen3", "embeddings", {"input": "a", "prompt_name": "nosuch"}, "it has: query, document"),
        ("reranker", "embeddings", {"input": "a"}, "computes no embeddings"),
        ("gemma3", "completions", {"prompt": "a"}, "does not generate text"),
        ("qwen3", "rerank", {"query": "a", "documents": []}, "documents: must have 1 or more items"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    servers: dict[str, Served], name: str, path: str, body: dict[str, object], words: str
) -> None:
    answer = servers[name].ask("POST", f"/v1/{path}", body)
    assert answer.status == 400 and words in answer.error["message"]


def test_an_encoder_does_not_chat_and_no_other_route_is_recommended(tmp_path: Path) -> None:
    """It has no chat template either, for which another error recommends to continue a text."""
    body = {"model": "bert", "messages": [{"role": "user", "content": "a"}]}
    with serving(*load_fp32(encoder(tmp_path / "bert")), ServerSettings(("bert",))) as served:
        refused = served.ask("POST", "/v1/chat/completions", body)
        assert refused.status == 400 and "does not generate text" in refused.error["message"]
        assert served.ask("POST", "/api/chat", body).json["error"].startswith("bert computes embeddings")


def test_long_texts_are_cut_only_where_ollama_cuts_them(servers: dict[str, Served]) -> None:
    answer = servers["qwen3"].ask("POST", "/api/embed", {"model": "qwen3", "input": "a " * 600})
    assert answer.status == 200 and answer.json["prompt_eval_count"] == 512
    refused = servers["qwen3"].ask("POST", "/api/embed", {"model": "qwen3", "input": "a " * 600, "truncate": False})
    assert refused.status == 400


def test_texts_are_cut_where_a_request_says_so(servers: dict[str, Served]) -> None:
    served, text = servers["qwen3"], "a " * 600
    assert served.ask("POST", "/v1/embeddings", {"input": text}).status == 400
    ids = served.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
    for tokens, length in ((9, 9), (-1, 512), (512, 512)):
        for whole in (text, ids):
            body = {"input": whole, "truncate_prompt_tokens": tokens}
            cut = served.ask("POST", "/v1/embeddings", body)
            assert cut.status == 200 and cut.json["usage"]["prompt_tokens"] == length, cut.body
            same = served.ask("POST", "/v1/embeddings", {"input": [*ids[: length - 1], ids[-1]]})
            assert cut.json["data"] == same.json["data"]
    for fields, param in (
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 9, "truncation_side": "left"}, "truncation_side"),
    ):
        wrong = served.ask("POST", "/v1/embeddings", {"input": text, **fields})
        assert wrong.status == 400 and wrong.error["param"] == param


def test_texts_end_at_the_length_that_the_model_declares(folders: dict[str, Path], tmp_path: Path) -> None:
    """E5-Mistral declares 4,096 tokens of its context of 32,768: sentence-transformers cuts texts there."""
    folder = tmp_path / "short"
    shutil.copytree(folders["qwen3"], folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    with serving(*load_fp32(folder), ServerSettings(("short",))) as served:
        for text in ("a " * 20, [5] * 20, ["a " * 20]):
            refused = served.ask("POST", "/v1/embeddings", {"input": text})
            assert refused.status == 400 and "maximum context length is 8 tokens" in refused.error["message"]
        assert served.ask("POST", "/v1/embeddings", {"input": [5] * 8}).status == 200
        cut = served.ask("POST", "/api/embed", {"model": "short", "input": "a " * 20})
        assert cut.json["prompt_eval_count"] == 8


def test_the_end_token_of_the_settings_follows_every_text(
    servers: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = servers["qwen3"]
    tokenizer = served.service.loaded.tokenizer
    expected = vectors(served, [[*tokenizer.encode(TEXTS[0], add_special=True), 2]])  # type: ignore[list-item]  # ids
    monkeypatch.setitem(tokenizer.__dict__, "missing_eos", (2,))
    assert (vectors(served, TEXTS[:1]) == expected).all()


def test_documents_are_ranked_by_vectors(servers: dict[str, Served]) -> None:
    served = servers["qwen3"]
    body = {"query": "What?", "documents": [*TEXTS, {"text": "an object"}], "top_n": 3, "return_documents": True}
    results = served.ask("POST", "/v1/rerank", body).json["results"]
    left = vectors(served, [PROMPTS["query"] + "What?"])[0]
    scores = [float(left @ vector) for vector in vectors(served, [*TEXTS, "an object"])]
    assert [result["index"] for result in results] == sorted(range(5), key=lambda index: -scores[index])[:3]
    assert all(abs(result["relevance_score"] - scores[result["index"]]) < 1e-6 for result in results)
    assert results[0]["document"]["text"] == [*TEXTS, "an object"][results[0]["index"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_scored_in_vllms_form(servers: dict[str, Served], path: str) -> None:
    def scores(model: str, **sides: object) -> list[float]:
        answer = servers[model].ask("POST", path, sides)
        assert answer.status == 200, answer.body
        assert [item["index"] for item in answer.json["data"]] == list(range(len(answer.json["data"])))
        return [item["score"] for item in answer.json["data"]]

    for model in ("qwen3", "reranker"):
        ranked = {}
        for query in ("What?", "Who is it?"):
            body = {"query": query, "documents": TEXTS}
            results = servers[model].ask("POST", "/v1/rerank", body).json["results"]
            ranked[query] = {result["index"]: result["relevance_score"] for result in results}
        first = [ranked["What?"][index] for index in range(len(TEXTS))]
        assert scores(model, text_1="What?", text_2=TEXTS) == scores(model, queries=["What?"], documents=TEXTS) == first
        both = {"text_1": ["What?", "Who is it?", "What?"], "text_2": TEXTS[:3]}
        assert scores(model, **both) == [first[0], ranked["Who is it?"][1], first[2]]
        assert scores(model, text_1="What?", text_2=TEXTS[0]) == first[:1]


@pytest.mark.parametrize(
    "body, param",
    [({"text_1": "a"}, "text_2"), ({"text_2": "a"}, "text_1"), ({"text_1": ["a", "b"], "text_2": "c"}, "text_1")],
)
def test_sides_that_make_no_pairs_are_refused(servers: dict[str, Served], body: dict[str, object], param: str) -> None:
    answer = servers["qwen3"].ask("POST", "/v1/score", body)
    assert answer.status == 400 and answer.error["param"] == param


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/v1/reranking", "/reranking"])
def test_reranking_goes_by_the_paths_of_other_servers(servers: dict[str, Served], path: str) -> None:
    body = {"query": "What?", "documents": TEXTS}
    answers = [servers["qwen3"].ask("POST", where, body) for where in ("/v1/rerank", path)]
    assert answers[1].status == 200 and answers[1].json == answers[0].json and answers[0].json["model"] == "qwen3"


@torch.no_grad()
def test_documents_are_ranked_by_a_reranker(servers: dict[str, Served], folders: dict[str, Path]) -> None:
    served = servers["reranker"]
    tokenizer = served.service.loaded.tokenizer
    model = AutoModelForCausalLM.from_pretrained(folders["reranker"], dtype=torch.float32)

    def expected(document: str) -> float:
        pair = f"<Instruct>: {INSTRUCTION}\n<Query>: What?\n<Document>: {document}"
        tags = [tokenizer.encode(tag, add_special=False, allow_special=True) for tag in (_BEFORE, _AFTER)]
        ids = [*tags[0], *tokenizer.encode(pair, add_special=False), *tags[1]]
        logits = model(torch.tensor([ids])).logits[0, -1]
        answers = [tokenizer.encode(word, add_special=False)[0] for word in ("no", "yes")]
        return float(torch.softmax(logits[answers], 0)[1])

    def scores(documents: list[str]) -> dict[int, float]:
        answer = served.ask("POST", "/v1/rerank", {"query": "What?", "documents": documents})
        assert answer.status == 200, answer.body
        return {result["index"]: result["relevance_score"] for result in answer.json["results"]}

    together = scores(TEXTS)
    assert list(together) == sorted(together, key=lambda index: -together[index])
    for index, text in enumerate(TEXTS):
        assert abs(together[index] - expected(text)) < 1e-5
        assert scores([text])[0] == together[index]


def test_a_reranker_with_other_answers_is_refused(servers: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    service = servers["reranker"].service
    score = service.loaded.score
    assert score is not None
    monkeypatch.setattr(service, "loaded", replace(service.loaded, score=replace(score, false=None)))
    answer = servers["reranker"].ask("POST", "/v1/rerank", {"query": "What?", "documents": ["a"]})
    assert answer.status == 400 and "LogitScore module has other tokens" in answer.error["message"]


def test_damaged_folders_are_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    import shutil

    from mycli.runtime.checkpoint.sentence_transformers import read_embedding_spec
    from mycli.runtime.errors import ModelError

    cases = {
        "[]": "has no Pooling module",
        "{}": "must be a list",
        '[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../x"}]': "is not a folder of the model",
        '[{"type": "a.Transformer"}, {"type": "a.LSTM", "path": "1_LSTM"}]': "module 'LSTM' is not supported",
    }
    folder = tmp_path / "damaged"
    shutil.copytree(folders["gemma3"], folder)
    for text, words in cases.items():
        (folder / "modules.json").write_text(text)
        with pytest.raises(ModelError, match=words):
            read_embedding_spec(folder, 64)
    shutil.copy(folders["gemma3"] / "modules.json", folder)
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 63, "out_features": 1}))
    with pytest.raises(ModelError, match="in_features"):
        read_embedding_spec(folder, 64)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 512}])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, name: str, shape: dict[str, int]) -> None:
    """The folder is written by the test, and by sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    folder = MAKERS[name](tmp_path / "made", **shape)  # type: ignore[operator]  # all take a shape
    model = library.SentenceTransformer(str(folder), device="cpu")
    model.save(str(tmp_path / "saved"))
    expected = model.encode(TEXTS)
    prompted = model.encode(TEXTS, prompt_name="query")
    for path in (folder, tmp_path / "saved"):
        with serving(*load_fp32(path), ServerSettings((name,))) as served:
            assert abs(vectors(served, TEXTS) - expected).max() < 1e-5
            assert abs(vectors(served, TEXTS, prompt_name="query") - prompted).max() < 1e-5


def test_a_text_that_fails_has_its_error_and_no_vector() -> None:
    reader = VectorReader(3, lambda hidden: hidden.mean(0))
    failed = reader.feed(SequenceOutput(0, finish_reason="error", error=UserError("out of memory")))
    assert (failed.index, failed.end, failed.problem, failed.vector) == (3, "error", "out of memory", None)
    done = reader.feed(SequenceOutput(0, finish_reason="stop", hidden=torch.tensor([[1.0], [3.0]])))
    assert done.vector is not None and done.vector.tolist() == [2.0] and not done.problem
