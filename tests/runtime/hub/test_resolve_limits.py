"""Test the limits of names and of suggestions: how long a name may be, and how many other names an error lists."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import NotFoundError, UsageError, UserError
from mycli.runtime.hub.resolve import Source, resolve, resolve_adapter
from tests.support.paths import PICO
from tests.support.stored_models import cached, quantized

pytestmark = pytest.mark.usefixtures("folders")


@pytest.mark.parametrize(("length", "kind"), [(0, UsageError), (4096, NotFoundError), (4097, UsageError)])
def test_an_empty_name_and_one_longer_than_a_path_are_refused(length: int, kind: type[UserError]) -> None:
    with pytest.raises(kind) as caught:
        resolve("x" * length)
    assert ("empty or not a name" in caught.value.message) == (kind is UsageError)


@pytest.mark.parametrize("name", ["org/na--me", "org/tiny@", "host:5000/name"])
def test_a_name_with_one_slash_is_a_repositorys_and_no_path(name: str) -> None:
    with pytest.raises(UsageError):
        resolve(name)


@pytest.mark.parametrize("find", [resolve, resolve_adapter])
def test_without_a_word_about_the_network_the_remedy_is_a_download(find: Callable[[str], Source]) -> None:
    with pytest.raises(NotFoundError) as caught:
        find("org/none")
    assert remedy(caught.value) == "mycli pull org/none"


def test_four_gguf_files_of_a_repository_are_named() -> None:
    names = [f"m-Q{number}_0.gguf" for number in range(2, 7)]
    cached({name: name.encode() for name in names})
    with pytest.raises(NotFoundError, match="each a model of its own") as caught:
        resolve("org/tiny")
    assert caught.value.hint == "give one: " + " or ".join(f"org/tiny:{name}" for name in names[:4])


def test_three_similar_names_are_suggested() -> None:
    for number in range(4):
        quantized(f"similar-{number}")
    with pytest.raises(NotFoundError) as caught:
        resolve("similar-x")
    assert caught.value.message.count("similar-") == 1 + 3


def test_one_similar_path_is_suggested(tmp_path: Path) -> None:
    for name in ("model-1.gguf", "model-2.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(NotFoundError) as caught:
        resolve("./model-x.gguf")
    assert " or " not in caught.value.message and "did you mean ./model-" in caught.value.message


@pytest.mark.parametrize(
    ("source", "label"),
    [
        (Source("org/tiny:m.gguf", Path("/cache/m.gguf"), "org/tiny"), "org/tiny"),
        (Source("./m.gguf", Path("/files/m.gguf")), "m"),
        (Source("pico", PICO), PICO.name),
        (Source("./pico", PICO), PICO.name),
        (Source("tiny:1b", Path(f"/blobs/sha256-{'0' * 64}")), "tiny:1b"),
    ],
    ids=["repository", "file", "name", "folder", "ollama"],
)
def test_a_label_is_the_repository_or_the_name_of_the_file_or_folder(source: Source, label: str) -> None:
    assert source.label == label
