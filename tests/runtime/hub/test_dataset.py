"""Test datasets of a hub on loopback: which file a name means, what is cached, and the error messages."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycli.runtime.errors import GateError, NotFoundError, UsageError
from mycli.runtime.hub import dataset
from mycli.runtime.hub.client import Hub, RetryPolicy
from mycli.runtime.hub.dataset import DatasetName
from tests.support.hub_server import Fault, HubServer, hub_server

ROWS = b'{"text": "one"}\n' * 200
FILES = {
    "README.md": b"# a dataset",
    "data/constraints.jsonl": b"{}",
    "data/test-00000-of-00001.parquet": b"PAR1" * 500,
    "data/train-00000-of-00002.parquet": b"PAR1" * 600,
    "data/train-00001-of-00002.parquet": b"PAR1" * 700,
    "data/extra/part.jsonl": ROWS,
}
QUICK = RetryPolicy(attempts=3, request_attempts=2, base_delay=0.01, timeout=5.0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_server() as running:
        running.commit = running.add("datasets/org/texts", FILES)  # type: ignore[attr-defined]  # for the tests here
        yield running


def fetch(server: HubServer, text: str) -> Path:
    with Hub(server.address(), None, lambda text: None, QUICK) as hub:
        return dataset.fetch_dataset(hub, dataset.plan_dataset(hub, DatasetName.parse(text)), lambda amount: None)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("org/texts", "data/train-00000-of-00002.parquet"),
        ("org/texts@main", "data/train-00000-of-00002.parquet"),
        ("org/texts:data/extra/part.jsonl", "data/extra/part.jsonl"),
        ("org/texts@main:README.md", "README.md"),
    ],
)
def test_the_file_meant_is_fetched_and_found_again(server: HubServer, tmp_path: Path, text: str, path: str) -> None:
    file = fetch(server, text)
    assert file.read_bytes() == FILES[path]
    snapshots = tmp_path / "hub" / "datasets--org--texts" / "snapshots"  # where huggingface_hub looks for it
    assert file == snapshots / server.commit / path  # type: ignore[attr-defined]  # see the fixture
    before = len(server.log)
    assert dataset.cached_dataset(DatasetName.parse(text)).read_bytes() == FILES[path] and len(server.log) == before


def test_huggingface_hub_finds_it(server: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    file = fetch(server, "org/texts:data/extra/part.jsonl")
    theirs = hf_hub_download(
        "org/texts",
        "data/extra/part.jsonl",
        repo_type="dataset",
        cache_dir=tmp_path / "hub",
        local_files_only=True,
    )
    assert Path(theirs) == file


def test_a_second_time_only_the_hub_is_asked(server: HubServer) -> None:
    fetch(server, "org/texts")
    fetched = len(server.requests("resolve"))
    fetch(server, "org/texts")
    assert len(server.requests("resolve")) == fetched == 1


@pytest.mark.parametrize(
    "text", ["texts", "org/texts/more", "org/..", "org/texts:", "org/texts:../x", "org/texts:/etc/passwd", "a/b:c//d"]
)
def test_what_is_no_name_is_refused_before_it_is_a_path(text: str) -> None:
    with pytest.raises(UsageError, match="hf:"):
        DatasetName.parse(text)


def test_each_failure_in_its_own_words(server: HubServer) -> None:
    server.add("datasets/org/pictures", {"a.png": b"x", "train.csv": b"a,b"})
    with pytest.raises(NotFoundError, match=r"org/pictures: no \.jsonl"):
        fetch(server, "org/pictures")
    with pytest.raises(NotFoundError, match="no such file") as caught:
        fetch(server, "org/texts:data/missing.txt")
    assert "data/constraints.jsonl" in caught.value.hint
    with pytest.raises(NotFoundError, match="datasets/org/none: no such dataset on"):
        fetch(server, "org/none")
    with pytest.raises(NotFoundError, match="has no revision v9"):
        fetch(server, "org/texts@v9")
    with pytest.raises(NotFoundError, match="not on this machine"):
        dataset.cached_dataset(DatasetName.parse("org/texts"))


def test_altered_contents_are_thrown_away(server: HubServer) -> None:
    server.fail("storage:", Fault(altered=True), times=9)
    with pytest.raises(GateError, match="does not have the hash"):
        fetch(server, "org/texts")
    with pytest.raises(NotFoundError):
        dataset.cached_dataset(DatasetName.parse("org/texts"))


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more"), (20, " and 12 more")])
def test_a_long_listing_is_cut(count: int, more: str) -> None:
    paths = [f"data/{number:02}.txt" for number in range(count)]
    with pytest.raises(NotFoundError, match="no such file") as caught:
        DatasetName.parse("org/texts:none.txt").choose(reversed(paths))
    assert caught.value.hint == f"there are {', '.join(paths[:8])}{more}"


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["a.txt", "b.jsonl"], "b.jsonl"),
        (["test.jsonl", "train.txt"], "train.txt"),
        (["constraints.jsonl", "my-train.parquet"], "my-train.parquet"),
        (["train/b.jsonl", "train/a.jsonl", "a.csv"], "train/a.jsonl"),
        (["train.jsonl.gz", "train.jsonl"], "train.jsonl"),
    ],
)
def test_the_training_split_is_chosen_then_the_suffix_then_the_name(paths: list[str], chosen: str) -> None:
    for order in (paths, paths[::-1]):
        assert DatasetName.parse("org/texts").choose(order) == chosen


def test_a_path_has_at_most_1023_characters() -> None:
    long = "/".join(["x" * 101] * 10 + ["y" * 3])
    assert len(long) == 1023 and DatasetName.parse(f"org/texts:{long}").path == long
    with pytest.raises(UsageError, match="not a path"):
        DatasetName.parse(f"org/texts:{long}y")
