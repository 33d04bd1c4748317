"""Records the replies to a request, so that a client can resume them after a lost connection or a killed server."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mycli.runtime.engine.replies.journal import RecordedReply, ReplyJournal, ReplyWriter, RunningReplyError, new_seed
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import ReplyStart, Request
from mycli.runtime.sampling.params import following_seed
from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.worker import OutputReader

Requests = Sequence[tuple[Request, Sequence[OutputReader]]]


class ReplyIds:
    """The id of a reply and of the calls and items in it; a resumed reply has the same ids."""

    def __init__(self, name: str, created: int) -> None:
        self.name, self.created, self._count = name, created, 0

    @classmethod
    def random(cls, prefix: str) -> "ReplyIds":
        return cls(f"{prefix}{secrets.token_hex(12)}", int(time.time()))

    def next(self, prefix: str) -> str:
        """Return the id of the next part of the reply."""
        # Derived from the name and a counter, not random: the record then holds no ids, and a resumed reply repeats
        # them.
        self._count += 1
        digest = hashlib.sha256(f"{self.name} {self._count}".encode()).hexdigest()
        return f"{prefix}{digest[:24]}"


class LeaveOut:
    """Drops the first characters of a reply, shown reasoning and content counted together; tool calls stay whole."""

    def __init__(self, count: int, shows_reasoning: bool = True) -> None:
        self._count, self._shows_reasoning = count, shows_reasoning

    def apply(self, piece: Piece) -> Piece:
        if not self._count:
            return piece
        reasoning = self._cut(piece.reasoning) if self._shows_reasoning else piece.reasoning
        parts = [self._cut(part) if isinstance(part, str) else part for part in piece.parts]
        return replace(piece, reasoning=reasoning, parts=tuple(part for part in parts if part))

    def _cut(self, text: str) -> str:
        cut = min(self._count, len(text))
        self._count -= cut
        return text[cut:]


@dataclass
class Work:
    """The requests that the engine still has to run, and the pieces that a record already holds.

    records: the record of each reply, by its index; leave_out: drops the part of the reply that the client has.
    """

    requests: Requests
    records: Mapping[int, RecordedReply] = field(default_factory=dict)
    pieces: Sequence[Piece] = ()
    writer: ReplyWriter | None = None
    leave_out: LeaveOut = field(default_factory=lambda: LeaveOut(0))

    def close(self, submitted: bool) -> None:
        """Close the record, and remove one of a request that was refused, whose id no client has seen."""
        if self.writer is not None:
            if submitted or self.writer.lines > 1:
                self.writer.close()
            else:
                self.writer.remove()


@dataclass(frozen=True)
class ReplyRecorder:
    """Records a request to one interface. body: as the client sent it; fingerprint: of the model."""

    journal: ReplyJournal
    ids: ReplyIds
    interface: str
    body: Mapping[str, Any]
    fingerprint: str

    def begin(self, requests: Requests) -> Work:
        """Create the record of new replies. If the disk does not allow it, they run without one."""
        # Not worth a record: evaluations are short, and a beam search has no tokens before its end.
        if any(request.prompt_logprobs or request.beams for request, _ in requests):
            return Work(requests)
        # Drawn here if the client sent none: with an unknown seed the reply could not be continued with the same
        # tokens.
        seeds = [new_seed(request.sampling) for request, _ in requests]
        header = {
            "kind": "server",
            "interface": self.interface,
            "created": self.ids.created,
            "fingerprint": self.fingerprint,
            "prompts": _digest(requests),
            "seeds": seeds,
            "body": self.body,
        }
        writer = self.journal.begin(self.ids.name, header)
        if writer is None:
            return Work(requests)
        started = [
            (replace(request, start=ReplyStart(seed)), readers)
            for (request, readers), seed in zip(requests, seeds, strict=True)
        ]
        indices = [reader.index for _, readers in requests for reader in readers]
        return Work(started, {index: RecordedReply(writer, index) for index in indices}, writer=writer)


@dataclass(frozen=True)
class Resumption:
    """Continues the replies of a record. header: its first line; after: characters that the client has already."""

    journal: ReplyJournal
    name: str
    header: Mapping[str, Any]
    fingerprint: str
    after: int = 0

    def begin(self, requests: Requests, shows_reasoning: bool) -> Work:
        """Return the recorded pieces and the rest of the work; `shows_reasoning`: to the client. Raises ApiError."""
        if self.header["fingerprint"] != self.fingerprint or self.header["prompts"] != _digest(requests):
            message = f"reply {self.name}: the model, its template or the server's options have changed since it began"
            raise ApiError(409, message, "reply_differs")
        count = sum(len(readers) for _, readers in requests)
        if self.after and count > 1:
            raise invalid_value("after", "the request has several replies")
        try:
            records = self.journal.resume(self.name, count)
        except RunningReplyError:
            raise ApiError(409, f"reply {self.name} is still being sent to another client", "reply_running") from None
        pieces: list[Piece] = []
        rest: list[tuple[Request, Sequence[OutputReader]]] = []
        for (request, readers), seed in zip(requests, self.header["seeds"], strict=True):
            # Each reply is a request of its own now: they stopped at different tokens, so they cannot branch off one
            # prompt.
            for number, reader in enumerate(readers):
                recorded = records[reader.index]
                pieces += (read := _replayed(reader, recorded))
                if not read or read[-1].end is None:
                    start = recorded.start(following_seed(seed, number))
                    rest.append((replace(request.for_reply(number), start=start), [reader]))
        leave_out = LeaveOut(self.after, shows_reasoning)
        return Work(rest, dict(enumerate(records)), pieces, records[0].writer, leave_out)


def _replayed(reader: OutputReader, recorded: RecordedReply) -> list[Piece]:
    pieces: list[Piece] = []
    for output in recorded.outputs:
        pieces.append(reader.feed(output))
        if pieces[-1].end is not None:
            break
    return pieces


def _digest(requests: Requests) -> str:
    # Everything besides the model that determines the tokens. The body alone does not: an updated chat template or
    # other server options give another prompt for it.
    parts = []
    for request, readers in requests:
        sampling = str(replace(request.sampling, seed=None))
        parts.append([request.prompt, request.limit, sorted(request.stop_ids), sampling, len(readers)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
