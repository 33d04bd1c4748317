"""Test rerankers with a classification head over HTTP: scores are those of a CrossEncoder of sentence-transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.server.http.settings import ServerSettings
from tests.support.embedding_models import WORD_PIECES, cross_encoder
from tests.support.served import Answer, Served, load_fp32, serving

QUERY = "what is it?"
DOCUMENTS = ["The cat sat, what?", "x", "a dog, the dog. " * 9, "that is the cat"]
CASES: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "mpnet": {},
    "gte": {"type_vocab_size": 2},
    "modernbert": {"local_attention": 8, "num_hidden_layers": 4},
    "modernbert-mean-biases": {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
}


@torch.no_grad()
def logits(folder: Path, typed: bool, query: str = QUERY) -> list[float]:
    """Return what transformers computes for each pair."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pairs = [tokenizer(query, document, return_tensors="pt") for document in DOCUMENTS]
    return [
        model(**{name: value for name, value in pair.items() if typed or name != "token_type_ids"}).logits.item()
        for pair in pairs
    ]


def scores(served: Served, documents: list[str], **fields: object) -> list[float]:
    answer = served.ask("POST", "/v1/rerank", {"query": QUERY, "documents": documents, **fields})
    assert answer.status == 200, (answer.body, served.log)
    by_index = {result["index"]: result["relevance_score"] for result in answer.json["results"]}
    order = [result["relevance_score"] for result in answer.json["results"]]
    assert order == sorted(order, reverse=True)
    return [by_index[index] for index in range(len(documents))]


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_definition_and_have_the_same_bits(case: str, tmp_path: Path) -> None:
    model_type = case.removesuffix("-mean-biases")
    folder = cross_encoder(tmp_path / "model", model_type, **CASES[case])
    expected = torch.sigmoid(torch.tensor(logits(folder, model_type in ("bert", "gte")))).tolist()
    with serving(*load_fp32(folder), ServerSettings((model_type,))) as served:
        batched = scores(served, DOCUMENTS)
        assert batched == pytest.approx(expected, abs=1e-6)
        assert [scores(served, [document])[0] for document in DOCUMENTS] == batched
        assert not served.service.loaded.warnings


@pytest.mark.parametrize("place", ["config.json", "older config.json", "config_sentence_transformers.json"])
def test_a_model_without_a_sigmoid(place: str, tmp_path: Path) -> None:
    """As MiniLM of MS MARCO, whose scores are logits."""
    folder = cross_encoder(tmp_path / "model")
    expected = logits(folder, True)
    name, identity = place.rpartition(" ")[2], "torch.nn.modules.linear.Identity"
    settings = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    nested = {"activation_fn": identity}
    if name == "config.json":
        nested = {"sentence_transformers": nested}  # type: ignore[dict-item]
    if place.startswith("older"):
        nested = {"sbert_ce_default_activation_function": identity}
    (folder / name).write_text(json.dumps({**settings, **nested}))
    with serving(*load_fp32(folder), ServerSettings(("bert",))) as served:
        assert scores(served, DOCUMENTS) == pytest.approx(expected, abs=2e-6)


def test_the_activation_of_foreign_code_is_the_default_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path / "model")
    for name, refused in (("models.custom.Activation", False), ("torch.nn.modules.activation.Softplus", True)):
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": name}))
        if refused:
            with pytest.raises(ModelError, match="activation_fn = 'torch.nn.modules.activation.Softplus'"):
                load_fp32(folder)
        else:
            loaded = load_fp32(folder)[0].cross_encoder
            assert loaded is not None and loaded.spec.activation == "Sigmoid"


def test_folders_that_sentence_transformers_writes(tmp_path: Path) -> None:
    """They have modules.json with one module, a prompt before the query, and the longest pair."""
    folder = cross_encoder(tmp_path / "model")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    (folder / "modules.json").write_text(json.dumps([module]))
    prompts = {"prompts": {"query": "find it, "}, "default_prompt_name": "query", "activation_fn": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    expected = torch.sigmoid(torch.tensor(logits(folder, True, f"find it, {QUERY}"))).tolist()
    with serving(*load_fp32(folder), ServerSettings(("bert",))) as served:
        assert scores(served, DOCUMENTS[:2]) == pytest.approx(expected[:2], abs=1e-6)
        assert scores(served, DOCUMENTS[:2], instruction="") != scores(served, DOCUMENTS[:2])
        long = served.ask("POST", "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        assert long.status == 400 and long.error["param"] == "documents" and "100" in long.error["message"]


def test_control_tokens_in_a_document_stay_text(tmp_path: Path) -> None:
    loaded, _ = load_fp32(cross_encoder(tmp_path / "model"))
    separator = WORD_PIECES.index("[SEP]")
    pair = loaded.tokenizer.encode_pair("a", "[SEP] b")
    assert pair.ids.count(separator) == 2 and pair.ids[-1] == separator
    assert pair.types == tuple([0] * 3 + [1] * (len(pair.ids) - 3))


def test_pairs_of_a_tokenizer_in_a_worker_process(tmp_path: Path) -> None:
    """As of RoBERTa, whose two separators are a part that does not run in this process."""
    folder = cross_encoder(tmp_path / "model", "roberta", type_vocab_size=1)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ends = {name: [text, WORD_PIECES.index(text)] for name, text in (("cls", "[CLS]"), ("sep", "[SEP]"))}
    tokenizer["post_processor"] = {"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with serving(*load_fp32(folder), ServerSettings(("roberta",))) as served:
        pair = served.service.loaded.tokenizer.encode_pair("a", "b")
        assert [WORD_PIECES[index] for index in pair.ids] == ["[CLS]", "a", "[SEP]", "[SEP]", "b", "[SEP]"]
        assert pair.types == () and len(scores(served, DOCUMENTS)) == len(DOCUMENTS)


def test_a_reranker_neither_embeds_nor_generates(tmp_path: Path) -> None:
    with serving(*load_fp32(cross_encoder(tmp_path / "model")), ServerSettings(("bert",))) as served:
        embedded = served.ask("POST", "/v1/embeddings", {"input": "a"})
        assert embedded.status == 400 and "it is a reranker, for /v1/rerank" in embedded.error["message"]
        listed = served.ask("GET", "/v1/models").json["data"][0]["capabilities"]
        assert listed == {"completion_chat": False, "function_calling": False}
        completed = served.ask("POST", "/v1/completions", {"prompt": "a"})
        assert completed.status == 400 and "scores pairs of texts" in completed.error["message"]


def test_a_type_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["pair"][-1]["SpecialToken"]["type_id"] = 2
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="token type 2 in pairs; the model has 2 types"):
        load_fp32(folder)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'XLMRobertaForSequenceClassification' has 3 labels: only rerankers"):
        open_model_folder(cross_encoder(tmp_path / "model", "xlm-roberta", num_labels=3))


@torch.no_grad()
def cut_logits(folder: Path, longest: int | None, query: str, documents: list[str]) -> list[float]:
    """Return what transformers computes for pairs that its tokenizer cuts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    options = {} if longest is None else {"truncation": True, "max_length": longest}
    pairs = [tokenizer(query, document, return_tensors="pt", **options) for document in documents]
    return torch.sigmoid(torch.cat([model(**pair).logits[0] for pair in pairs])).tolist()  # type: ignore[no-any-return]


def test_pairs_are_cut_as_vllm_cuts_them(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    with serving(*load_fp32(folder), ServerSettings(("bert",))) as served:

        def ask(**fields: object) -> Answer:
            return served.ask("POST", "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **fields})

        refused = ask()
        assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
        for longest in (40, 39, 17, 16, 6, 5, 4):
            expected = cut_logits(folder, longest, QUERY, DOCUMENTS)
            assert scores(served, DOCUMENTS, truncate_prompt_tokens=longest) == pytest.approx(expected, abs=1e-6)
        long = "that is the cat, " * 9
        expected = cut_logits(folder, 15, long, DOCUMENTS)
        assert scores(served, DOCUMENTS, query=long, truncate_prompt_tokens=15) == pytest.approx(expected, abs=1e-6)
        whole = scores(served, DOCUMENTS, truncate_prompt_tokens=-1)
        assert whole == scores(served, DOCUMENTS, truncate_prompt_tokens=40)
        assert scores(served, DOCUMENTS[:2]) == scores(served, DOCUMENTS[:2], truncate_prompt_tokens=-1)
        for tokens, side, param in (
            (41, "right", "truncate_prompt_tokens"),
            (3, "right", "truncate_prompt_tokens"),
            (20, "left", "truncation_side"),
        ):
            wrong = ask(truncate_prompt_tokens=tokens, truncation_side=side)
            assert wrong.status == 400 and wrong.error["param"] == param, wrong.body


def test_queries_and_documents_are_cut_as_cohere_cuts_them(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path / "model")
    with serving(*load_fp32(folder), ServerSettings(("bert",))) as served:
        body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 4, "return_documents": True}
        answer = served.ask("POST", "/v2/rerank", body)
        assert {result["document"]["text"] for result in answer.json["results"]} == set(DOCUMENTS)
        cut = ["The cat s", "x", "a dog", "that i"]  # letters are tokens: "##o" and "##g" of "dog"
        assert scores(served, DOCUMENTS, max_tokens_per_doc=4) == scores(served, cut) != scores(served, DOCUMENTS)
        assert scores(served, DOCUMENTS, max_tokens_per_doc=0) == scores(served, DOCUMENTS)
        assert scores(served, DOCUMENTS, max_tokens_per_doc=4096) == scores(served, DOCUMENTS)
        assert scores(served, DOCUMENTS, max_tokens_per_query=5) == scores(served, DOCUMENTS, query="what is")
