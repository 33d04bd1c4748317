"""Test which prompts a reranker reads, and which models do not rerank."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.routes.rerank import INSTRUCTION, MAX_PAIRS, PairOptions, RerankRequest, prepare_pairs
from mycli.runtime.server.service import Service
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.embedding_models import qwen3_reranker
from tests.support.served import load_fp32, unserved

BEFORE, AFTER = "<|im_start|>system\nJudge whether", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PAIR = ("What is it?", "A dog, and a cat that sat on the mat.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_reranker(tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> LoadedModel:
    return load_fp32(folder)[0]


@pytest.fixture(scope="module", params=[True, False], ids=["head", "no-head"])
def service(reranker: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Service]:
    """Provide the reranker with and without the module that names its answers."""
    loaded = reranker if request.param else replace(reranker, score=None)
    service = unserved(loaded, context=256)
    yield service
    service.close()


def ids(service: Service, **fields: Any) -> Sequence[int]:
    (group,) = prepare_pairs(service, PairOptions(**fields), [PAIR]).groups
    (read,) = group.prompts
    return read


def prompt(service: Service, **fields: Any) -> str:
    """Return the prompt of a pair as the model reads it."""
    text = service.loaded.tokenizer.spelled(ids(service, **fields))
    assert text.startswith(BEFORE) and text.endswith(AFTER)
    return text.removesuffix(AFTER).rpartition("<|im_start|>user\n")[2]


@pytest.mark.parametrize(
    ("fields", "instruction"),
    [
        ({}, INSTRUCTION),
        ({"instruction": "Find pets."}, "Find pets."),
        ({"instruct": "Find pets."}, "Find pets."),
        ({"instruction": "Find pets.", "instruct": "Find cats."}, "Find pets."),
        ({"instruction": "", "instruct": "Find cats."}, ""),
    ],
)
def test_the_instruction_of_either_name_comes_first(service: Service, fields: Any, instruction: str) -> None:
    assert prompt(service, **fields) == f"<Instruct>: {instruction}\n<Query>: {PAIR[0]}\n<Document>: {PAIR[1]}"


def test_a_pair_is_cut_and_the_markup_around_it_stays(service: Service) -> None:
    whole, length = prompt(service), len(ids(service))
    for tokens in (length + 1, length, -1):
        assert prompt(service, truncate_prompt_tokens=tokens) == whole
    for tokens in (length - 1, length - 5):
        assert len(ids(service, truncate_prompt_tokens=tokens)) == tokens
        text = prompt(service, truncate_prompt_tokens=tokens)
        assert whole.startswith(text) and text != whole


def without_markup(model: LoadedModel, folder: Path, changed: Path) -> LoadedModel:
    shutil.copy(folder / "tokenizer_config.json", changed)
    tokenizer = (folder / "tokenizer.json").read_text()
    (changed / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", "<|turn|>"))
    return replace(model, tokenizer=Tokenizer.load(changed, 4096))


def test_a_model_without_the_markup_or_the_answers_is_refused(
    loaded: LoadedModel, reranker: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    assert len(loaded.tokenizer.encode("yes", add_special=False)) > len(
        loaded.tokenizer.encode("no", add_special=False)
    )
    for model in (loaded, without_markup(reranker, folder, tmp_path)):
        service = unserved(model, context=256)
        with pytest.raises(ApiError, match="pico does not rerank: no reranker's head, no embeddings") as error:
            prepare_pairs(service, PairOptions(), [PAIR])
        assert (error.value.status, error.value.param) == (400, "model")
        service.close()


def test_documents_have_a_largest_number() -> None:
    assert MAX_PAIRS == 1024
    assert len(RerankRequest(query="a", documents=["b"] * MAX_PAIRS).documents) == MAX_PAIRS
    with pytest.raises(ValidationError, match="at most 1024 items"):
        RerankRequest(query="a", documents=["b"] * (MAX_PAIRS + 1))
