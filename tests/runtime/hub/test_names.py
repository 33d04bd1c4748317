"""Test how names of models are read: addresses, quants, and names of other programs."""

import pytest

from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub import names as hub_names
from mycli.runtime.hub.names import choose_quant, normalize_model_name, split_name, split_quant, suggest_models
from mycli.runtime.hub.resolve import resolve


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("llama3", "meta-llama/Llama-3"),
        ("llama3:latest", "meta-llama/Llama-3"),
        ("qwen2.5:7b", "Qwen/Qwen2.5-7B"),
        ("qwen", "Qwen/Qwen3"),
        ("Phi4", "microsoft/phi-4"),
        ("phi", "microsoft/phi-4"),
        ("7b", None),
        ("zzz", None),
        ("a b", None),
    ],
)
def test_names_of_other_programs_get_candidates(name: str, first: str | None) -> None:
    found = suggest_models(name)
    assert found[0].startswith(first) if first else not found
    assert len(found) <= 4


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "org/x y", "org/x.git", "org/x--y", "org/x..y", "org/x.", "https://hf.co/org/x"]
)
def test_what_is_no_repository(name: str) -> None:
    with pytest.raises(UsageError, match="not a model of the hub"):
        hub_names.split_name(name)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("https://huggingface.co/org/files/blob/main/a-Q4_K_M.gguf", "org/files@main:a-Q4_K_M.gguf"),
        ("https://huggingface.co/org/files/resolve/main/a.gguf?download=true", "org/files@main:a.gguf"),
        ("https://huggingface.co/org/files/blob/main/README.md", "org/files@main"),
        ("https://huggingface.co/org/files/blob/main/Q4_0/a.gguf", "org/files@main:Q4_0/a.gguf"),
        ("https://huggingface.co/org/files/tree/refs%2Fpr%2F1", "org/files@refs/pr/1"),
        ("hf://org/files", "org/files"),
        ("org/files:a.gguf", "org/files:a.gguf"),
    ],
)
def test_an_address_of_a_gguf_file_names_the_file(typed: str, name: str) -> None:
    assert normalize_model_name(typed) == name


@pytest.mark.parametrize(
    ("quant", "file"),
    [("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf")]
    + [("Q8_0", "m.q8_0-00001-of-00002.gguf"), ("Q4_K_S", None), ("BF16", None)],
)
def test_a_quant_names_the_file_with_that_word_and_the_shortest_name(quant: str, file: str | None) -> None:
    files = ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-IQ4_XS.gguf", "m.q8_0-00001-of-00002.gguf", "m-Q4_K_M-long.gguf"]
    assert choose_quant(files, quant) == file
    assert choose_quant([f"{quant}/m-00001-of-00002.gguf"], quant), "the folder of its parts"


@pytest.mark.parametrize("model", ["org/m:Q4_K_M", "hf.co/org/m:Q4_K_M", "ollama run hf.co/org/m:Q4_K_M"])
def test_a_quant_is_part_of_a_name(model: str) -> None:
    assert split_quant(normalize_model_name(model)) == ("org/m", "Q4_K_M")


@pytest.mark.parametrize(
    "model", ["ollama.com/library/qwen3:8b", "https://ollama.com/library/qwen3", "ollama run qwen3:8b"]
)
def test_names_of_ollama_are_explained(model: str) -> None:
    for find in (resolve, split_name):
        with pytest.raises(NotFoundError, match="Ollama's library") as caught:
            find(model)
        assert "Qwen/Qwen3" in caught.value.data["candidates"]


@pytest.mark.parametrize("model", ["./m", "../m", "/m", "~/m", "m/", "org\\m"])
def test_a_name_may_be_a_path_alone(model: str) -> None:
    assert hub_names.is_path(model) and not hub_names.is_path("org/m") and not hub_names.is_path("m")


@pytest.mark.parametrize("revision", ["a/../b", "..", "a..b", "a/", "a b", "/a", ""])
def test_what_is_no_revision(revision: str) -> None:
    assert split_name("org/x@refs/pr/1") == ("org/x", "refs/pr/1")
    with pytest.raises(UsageError, match="is not a revision"):
        split_name(f"org/x@{revision}")


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("org/m:a.gguf", "a.gguf"),
        ("org/m@v1:Q4_0/a.gguf", "Q4_0/a.gguf"),
        ("org/m:../a.gguf", None),
        ("org/m:/a.gguf", None),
        ("org/m:a.bin", None),
        ("m:a.gguf", None),
        ("./org/m:a.gguf", None),
    ],
)
def test_a_file_of_a_repository_is_a_gguf_file_inside_it(model: str, file: str | None) -> None:
    assert hub_names.split_file(model) == ((model, None) if file is None else (model.partition(":")[0], file))


@pytest.mark.parametrize("model", ["m:Q4_K_M", "./org/m:Q4_K_M", "org/m:latest", "org/m", "org/m:Q4_K_M.gguf"])
def test_what_names_no_quant_of_a_repository(model: str) -> None:
    assert split_quant(model) == (model, None)


@pytest.mark.parametrize("path", ["../a", "a/../b", "/a", "a//b", "a/.b/c", "a/", "a\\b", "a/b\n", "a/" * 511 + "ab"])
def test_what_is_no_path_inside_a_repository(path: str) -> None:
    assert not hub_names.safe_path(path)
    assert hub_names.safe_path("a/b c.gguf") and hub_names.safe_path("a/" * 511 + "a")
