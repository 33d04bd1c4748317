"""Test that killed and resumed replies have the tokens of uninterrupted ones; records are private and bounded."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.journal import RecordedReply, ReplyJournal, RunningReplyError
from mycli.runtime.engine.sequence import ReplyStart, SequenceOutput
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.sampling.logprobs import TokenLogprob
from tests.support.resumed import KINDS, engine_for, load_pico, record_whole, requests, resumed_after_kill


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_pico()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_reply_continues_with_the_same_tokens(kind: str, loaded: LoadedModel, tmp_path: Path) -> None:
    engine = engine_for(loaded, kind)
    whole = record_whole(engine, requests(loaded, kind), tmp_path)
    assert all(len(tokens) > 5 for tokens in whole.tokens)
    if kind == "preempted":
        assert engine.stats.preemptions
    random = Random(0)
    for _ in range(3):
        engine.forget()
        assert resumed_after_kill(engine, whole, tmp_path, random) == list(whole.tokens)


def output(*tokens: int, **fields: object) -> SequenceOutput:
    return SequenceOutput(0, tokens, **fields)  # type: ignore[arg-type]  # passed on


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[ReplyJournal]:
    return ReplyJournal(tmp_path / "replies")


def test_a_record_holds_what_was_generated(journal: ReplyJournal) -> None:
    writer = journal.begin("a", {"kind": "test"})
    assert writer is not None
    logprobs = (TokenLogprob(3, -0.125, ((3, -0.125), (9, float("-inf")))),)
    for part in (
        output(3, numbers=1, logprobs=logprobs),
        output(),
        output(4, 5, numbers=3, finish_reason="length", shortened=True),
    ):
        RecordedReply(writer, 1).append(part)
    RecordedReply(writer, 0).append(output(finish_reason="cancelled"))  # not an end: it can be resumed
    writer.close()
    assert journal.header("a") == {"version": 2, "kind": "test"}
    first, second = journal.resume("a", 2)
    assert not first.outputs and second.start(9) == ReplyStart(9, (3, 4, 5), 3, shortened=True)
    assert [part.finish_reason for part in second.outputs] == [None, "length"]
    assert second.outputs[0].logprobs == logprobs


def test_records_are_private(journal: ReplyJournal) -> None:
    writer = journal.begin("a", {})
    assert writer is not None
    assert writer.path.stat().st_mode & 0o777 == 0o600 and journal.folder.stat().st_mode & 0o777 == 0o700


def test_a_running_reply_is_not_continued(journal: ReplyJournal) -> None:
    writer = journal.begin("a", {})
    assert writer is not None
    with pytest.raises(RunningReplyError):
        journal.resume("a", 1)
    writer.close()
    RecordedReply(writer).append(output(1))  # too late, so dropped
    assert not journal.resume("a", 1)[0].outputs


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a" * 65, "b", "a\0"])
def test_names_that_are_no_record_are_not_found(name: str, journal: ReplyJournal) -> None:
    for ask in (journal.header, lambda name: journal.resume(name, 1)):
        with pytest.raises(NotFoundError):
            ask(name)


@pytest.mark.parametrize("line", ['{"version": 1}', "[]", "1"])
def test_another_version_is_refused(line: str, journal: ReplyJournal) -> None:
    journal.folder.mkdir()
    (journal.folder / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="another version"):
        journal.header("a")


@pytest.mark.parametrize(
    "line", ["{", "[0]", '[0, ["x"], 1, null, [], false]', "[0, [1], 1, null, [[1]], false]", "null"]
)
def test_a_damaged_line_ends_what_is_continued(line: str, journal: ReplyJournal) -> None:
    journal.folder.mkdir()
    lines = ['{"version": 2}', "[0, [1], 1, null, [], false]", line, "[0, [2], 2, null, [], false]"]
    (journal.folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    assert journal.resume("a", 1)[0].start(0).tokens == (1,)


def test_records_are_bounded_in_size_and_age(tmp_path: Path) -> None:
    journal = ReplyJournal(tmp_path, most_bytes=4000, most_seconds=100)
    for index in range(30):
        writer = journal.begin(f"a{index}", {"text": "x" * 300})
        assert writer is not None
        writer.close()
        os.utime(writer.path, (10**9 + index, 10**9 + index) if index == 29 else None)
    left = journal.names()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000 + 2 * 350 and "a28" in left
    journal.begin("new", {"text": "x" * 300})
    assert "a29" not in journal.names() and "a28" in journal.names()


def test_a_folder_that_cannot_be_written_records_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ReplyJournal(tmp_path / "file" / "replies").begin("a", {}) is None


def test_a_full_disk_ends_the_record_and_not_the_reply(journal: ReplyJournal) -> None:
    writer = journal.begin("a", {})
    assert writer is not None

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    writer._file = Full()  # type: ignore[assignment]  # simulates a full disk
    RecordedReply(writer).append(output(1))
    assert not writer.path.exists() and json.dumps(journal.names()) == "[]"


def test_a_partial_line_is_cut_off_and_the_record_goes_on(journal: ReplyJournal) -> None:
    journal.folder.mkdir()
    lines = '{"version": 2}\n[0, [1], 1, null, [], false]\n[1, [7], 1, null, [], false]\n'
    (journal.folder / "a.jsonl").write_text(lines + "[0, [2], 2, nu")
    (reply,) = journal.resume("a", 1)
    assert reply.start(0).tokens == (1,) and reply.writer.lines == 3
    reply.append(output(5, numbers=2))
    reply.writer.close()
    assert reply.writer.lines == 4
    first, second = journal.resume("a", 2)
    assert first.start(0) == ReplyStart(0, (1, 5), 2) and second.start(0).tokens == (7,)


def test_the_record_written_last_is_named_first(journal: ReplyJournal) -> None:
    for index, name in enumerate(("b", "c", "a")):
        writer = journal.begin(name, {})
        assert writer is not None
        os.utime(writer.path, (10**9 + index, 10**9 + index))
    assert journal.names() == ["a", "c", "b"]
