"""Test what a record holds of a request, when it is removed, and what is left to run after it, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.engine.replies.journal import ReplyJournal
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import BeamOptions, ReplyStart, Request, SequenceOutput
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.recording import LeaveOut, ReplyIds, ReplyRecorder, Requests, Resumption, Work
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall

CALL = ToolCall("look_up", "{}")
STOP = 9  # the token of a stop string, which the reader sees and the engine does not


@dataclass
class Reader:
    index: int

    def feed(self, output: SequenceOutput) -> Piece:
        end: Any = "stop_string" if STOP in output.tokens else output.finish_reason
        return Piece(self.index, tokens=output.tokens, end=end)


def request(*prompt: int, **fields: Any) -> Request:
    return Request(prompt, SamplingParams(seed=7), **fields)


# Two replies to the first prompt, one to the second.
REQUESTS: Requests = [(request(1, limit=4), [Reader(0), Reader(1)]), (request(2, 3, limit=4), [Reader(2)])]
SINGLE: Requests = [(request(1, limit=4), [Reader(0)])]


@pytest.fixture
def journal(tmp_path: Path) -> ReplyJournal:
    return ReplyJournal(tmp_path / "replies")


def begin(journal: ReplyJournal, requests: Requests) -> Work:
    return ReplyRecorder(journal, ReplyIds("reply", 5), "chat", {"n": 2}, "model").begin(requests)


def record(journal: ReplyJournal, requests: Requests, outputs: Sequence[tuple[int, SequenceOutput]] = ()) -> None:
    """Write the record of a server that was killed after `outputs` of its replies."""
    work = begin(journal, requests)
    for index, output in outputs:
        work.records[index].append(output)
    work.close(submitted=True)


def resume(journal: ReplyJournal, requests: Requests, after: int = 0, fingerprint: str = "model") -> Work:
    return Resumption(journal, "reply", journal.header("reply"), fingerprint, after).begin(requests, True)


def test_ids_are_different_within_a_reply_and_the_same_when_it_is_resumed() -> None:
    first, again, other = (ReplyIds(name, 5) for name in ("a", "a", "b"))
    ids = [first.next("call_") for _ in range(3)]
    assert ids == [again.next("call_") for _ in range(3)]
    assert len({*ids, other.next("call_")}) == 4 and all(name.startswith("call_") for name in ids)
    assert ReplyIds.random("msg_").name != ReplyIds.random("msg_").name


@pytest.mark.parametrize(
    ("count", "shown", "reasoning", "parts"),
    [
        (0, True, "abc", ("de", CALL, "fg")),
        (2, True, "c", ("de", CALL, "fg")),
        (3, True, "", ("de", CALL, "fg")),
        (4, True, "", ("e", CALL, "fg")),
        (5, True, "", (CALL, "fg")),
        (6, True, "", (CALL, "g")),
        (99, True, "", (CALL,)),
        (1, False, "abc", ("e", CALL, "fg")),
    ],
)
def test_characters_that_a_client_has_are_left_out_and_calls_are_whole(
    count: int, shown: bool, reasoning: str, parts: tuple[str | ToolCall, ...]
) -> None:
    leave_out = LeaveOut(count, shown)
    pieces = [leave_out.apply(piece) for piece in (Piece(reasoning="abc"), Piece(parts=("de", CALL, "fg")))]
    assert (pieces[0].reasoning, pieces[1].parts) == (reasoning, parts)


def test_a_record_names_what_determines_the_tokens(journal: ReplyJournal) -> None:
    unseeded = (replace(request(8), sampling=SamplingParams()), [Reader(3)])
    work = begin(journal, [*REQUESTS, unseeded])
    header = journal.header("reply")
    assert {name: header[name] for name in ("interface", "created", "fingerprint", "body")} == {
        **{"interface": "chat", "created": 5, "fingerprint": "model", "body": {"n": 2}},
    }
    assert header["seeds"][:2] == [7, 7]
    assert [started.start for started, _ in work.requests] == [ReplyStart(seed) for seed in header["seeds"]]
    assert list(work.records) == [0, 1, 2, 3]
    assert work.leave_out.apply(Piece(parts=("abc",))).parts == ("abc",), "a new reply is whole"


@pytest.mark.parametrize("fields", [{"prompt_logprobs": True}, {"beams": BeamOptions(2)}], ids=["evaluation", "beams"])
def test_evaluations_and_beam_searches_have_no_record(journal: ReplyJournal, fields: dict[str, Any]) -> None:
    requests = [*SINGLE, (request(1, **fields), [Reader(1)])]
    work = begin(journal, requests)
    assert (work.writer, work.requests, journal.names()) == (None, requests, [])


def test_replies_run_without_a_record_where_none_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    work = begin(ReplyJournal(tmp_path / "file"), SINGLE)
    work.close(submitted=True)
    assert (work.writer, work.requests) == (None, SINGLE)


@pytest.mark.parametrize(
    ("submitted", "tokens", "stays"), [(False, 0, False), (False, 1, True), (True, 0, True), (True, 2, True)]
)
def test_only_the_record_of_a_refused_request_is_removed(
    journal: ReplyJournal, submitted: bool, tokens: int, stays: bool
) -> None:
    work = begin(journal, SINGLE)
    for _ in range(tokens):
        work.records[0].append(SequenceOutput(1, (5,)))
    work.close(submitted)
    assert journal.names() == (["reply"] if stays else [])


def test_replies_continue_from_their_own_last_tokens(journal: ReplyJournal) -> None:
    """The first has ended, the second stopped after a token, and the third has not begun."""
    outputs = [
        (0, SequenceOutput(1, (5,), numbers=1)),
        (1, SequenceOutput(2, (6,), numbers=1)),
        (0, SequenceOutput(1, (5,), numbers=2, finish_reason="stop")),
    ]
    record(journal, REQUESTS, outputs)
    work = resume(journal, REQUESTS)
    assert [(piece.index, piece.tokens, piece.end) for piece in work.pieces] == [
        (0, (5,), None),
        (0, (5,), "stop"),
        (1, (6,), None),
    ]
    rest = [(request.prompt, request.start, [reader.index for reader in readers]) for request, readers in work.requests]
    assert rest == [((1,), ReplyStart(8, (6,), 1), [1]), ((2, 3), ReplyStart(7), [2])]
    work.records[1].append(SequenceOutput(2, (7,)))
    work.close(submitted=True)
    assert [piece.tokens for piece in resume(journal, REQUESTS).pieces] == [(5,), (5,), (6,), (7,)]


def test_a_reply_that_a_stop_string_ended_does_not_continue(journal: ReplyJournal) -> None:
    record(journal, SINGLE, [(0, SequenceOutput(1, (token,))) for token in (5, STOP, 6)])
    work = resume(journal, SINGLE)
    assert [piece.tokens for piece in work.pieces] == [(5,), (STOP,)] and not work.requests


def test_what_a_client_has_is_counted_in_a_single_reply_alone(journal: ReplyJournal) -> None:
    record(journal, SINGLE)
    work = resume(journal, SINGLE, after=2)
    assert work.leave_out.apply(Piece(parts=("abc",))).parts == ("c",)
    work.close(submitted=False)
    two = OTHERS["replies"]
    record(ReplyJournal(journal.folder / "two"), two)
    with pytest.raises(ApiError) as error:
        resume(ReplyJournal(journal.folder / "two"), two, after=1)
    assert error.value.param == "after"


OTHERS: dict[str, Requests] = {
    "prompt": [(request(2, limit=4), [Reader(0)])],
    "limit": [(request(1, limit=5), [Reader(0)])],
    "end tokens": [(request(1, limit=4, stop_ids=frozenset({2})), [Reader(0)])],
    "sampling": [(replace(request(1, limit=4), sampling=SamplingParams(temperature=0.5)), [Reader(0)])],
    "replies": [(request(1, limit=4), [Reader(0), Reader(1)])],
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_request_that_gives_other_tokens_now_is_not_continued(journal: ReplyJournal, other: str) -> None:
    record(journal, SINGLE)
    with pytest.raises(ApiError) as error:
        resume(journal, OTHERS[other])
    assert (error.value.status, error.value.code) == (409, "reply_differs")


def test_a_reply_of_another_model_or_of_a_running_request_is_not_continued(journal: ReplyJournal) -> None:
    running = begin(journal, SINGLE)
    for fingerprint, code in (("other", "reply_differs"), ("model", "reply_running")):
        with pytest.raises(ApiError) as error:
            resume(journal, SINGLE, fingerprint=fingerprint)
        assert (error.value.status, error.value.code) == (409, code)
    running.close(submitted=True)
    reseeded = [(replace(request(1, limit=4), sampling=SamplingParams(seed=3)), [Reader(0)])]
    assert resume(journal, reseeded).requests[0][0].start == ReplyStart(7), "the seed of the record counts"
