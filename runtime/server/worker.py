"""The threads between requests and engine: one makes tokens, one makes text of them, and nobody waits for a client.

The engine's thread owns the engine: submissions and cancellations reach it between steps. The text thread feeds each
`ReplyReader` and hands what is new to the event loop of whoever asked, for all sequences of a step at once. Does not
know protocols.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.errors import UserError
from mycli.runtime.kernels.cpu.threads import release_threads
from mycli.runtime.server.api_error import ApiError, from_user_error, internal_error
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.metrics import Metrics
from mycli.runtime.server.reply_reader import Piece, ReplyReader

TELL_SECONDS = 0.003  # that a step waits at most for those of the one before to be told


class ServedEngine(Protocol):
    """What is asked of `runtime.engine.engine.Engine`; all of it from one thread."""

    @property
    def context(self) -> int:
        """Most tokens of a sequence, prompt and reply."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    @property
    def stats(self) -> EngineStats:
        """How busy it is."""
        ...

    @property
    def shares_cores(self) -> bool:
        """Whether its steps take the cores that making text and writing it needs."""
        ...

    def submit(self, request: Request) -> int:
        """Take a sequence and give it a number. Raises UserError for one that can never run."""
        ...

    def branch(self, sequence: int, count: int) -> list[int]:
        """So many more replies to the prompt of a sequence that has not drawn yet, each with the next seed."""
        ...

    def forget(self) -> None:
        """Keep nothing of the texts so far."""
        ...

    def cancel(self, sequence: int) -> None:
        """Forget a sequence; its last output may still come. Of one that has ended: nothing."""
        ...

    def step(self) -> Sequence[SequenceOutput]:
        """Make the next tokens. A failure of one sequence is an output of it, not an exception."""
        ...


@dataclass(eq=False)
class Ticket:
    """One sequence that was asked for, with the times of its life on the clock of time.perf_counter."""

    request: Request
    reader: ReplyReader
    delivery: Delivery
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    sequence: int | None = None  # the engine's number, once it has one
    over: bool = False
    tokens: int = 0


class EngineWorker:
    """Runs an engine for many requests at once; `log` is told what went wrong inside."""

    def __init__(self, engine: ServedEngine, most_waiting: int, log: Callable[[str], None]) -> None:
        self.engine = engine
        self.metrics = Metrics(lambda: self.stats)
        self._most_waiting, self._log = most_waiting, log
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[list[tuple[Ticket, SequenceOutput | ApiError]] | None] = queue.SimpleQueue()
        self._told = threading.Event()  # the last step's tokens are on their way
        self._by_sequence: dict[int, Ticket] = {}  # the engine thread's
        self._threads = [
            threading.Thread(target=self._run_engine, name="engine", daemon=True),
            threading.Thread(target=self._run_text, name="text", daemon=True),
        ]
        self.stats = engine.stats  # after the last step: the engine itself belongs to its thread
        self.failed = ""  # why no request can be served any more

    def start(self) -> None:
        """Begin to serve. What the calling thread has done with the engine is the engine's thread's from now on."""
        release_threads()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; what is under way is left."""
        self._orders.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    @property
    def underway(self) -> int:
        """Sequences that were asked for and have not ended."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Sequences of which nothing has come yet."""
        with self._lock:
            return sum(ticket.first is None for ticket in self._tickets)

    def submit(self, wanted: Sequence[tuple[Request, ReplyReader]], delivery: Delivery) -> list[Ticket]:
        """Ask for sequences. Raises ApiError where too many wait, or none can be served."""
        if self.failed:
            raise ApiError(503, f"the engine has failed: {self.failed}", "engine_failed")
        tickets = [Ticket(request, reader, delivery) for request, reader in wanted]
        with self._lock:
            waiting = sum(ticket.first is None for ticket in self._tickets)
            if waiting and waiting + len(tickets) > self._most_waiting:
                message = f"{waiting} sequences are waiting, the most that may"
                raise ApiError(429, message, "queue_full", headers={"retry-after": "5"})
            self._tickets.update(tickets)
        self._orders.put(lambda: self._enter(tickets))
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Forget sequences whose client has gone."""
        left = [ticket for ticket in tickets if not ticket.over]
        if left:
            self._orders.put(lambda: self._leave(left))

    def cancel_all(self) -> None:
        """Forget everything: the server ends."""
        with self._lock:
            tickets = list(self._tickets)
        error = ApiError(503, "the server is shutting down", "shutting_down")
        self._orders.put(lambda: self._fail(tickets, error))

    # The engine's thread

    def _run_engine(self) -> None:
        while True:
            orders = [] if self.engine.has_work else [self._orders.get()]
            orders += [self._orders.get() for _ in range(self._orders.qsize())]  # no more: a step must come, too
            for order in orders:
                if order is None:
                    self._steps.put(None)
                    return
                order()
            if self.engine.has_work:
                self._step()
            self.stats = self.engine.stats

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # a bug, or a lost device: these replies have failed, the server lives
            self._log(f"the engine failed: {type(error).__name__}: {error}")
            if type(error).__name__ == "AcceleratorError":  # of torch: nothing works after it
                self.failed = str(error).splitlines()[0][:200]
            self._fail(list(self._by_sequence.values()), internal_error())
            self.engine.forget()  # what the pass left in the cache is not known
            return
        found: list[tuple[Ticket, SequenceOutput | ApiError]] = []
        for output in outputs:
            ticket = self._by_sequence.get(output.sequence)
            if ticket is not None:
                found.append((ticket, output))
                if output.finish_reason is not None:
                    del self._by_sequence[output.sequence]
        if found:
            self._told.clear()
            self._steps.put(found)
            if self.engine.shares_cores:  # a pass whose threads wait for a core takes longer than both by themselves
                self._told.wait(TELL_SECONDS)

    def _enter(self, tickets: Sequence[Ticket]) -> None:
        """Submit sequences; of those with one prompt the first, which the others then begin with."""
        for _, same in groupby(tickets, key=_shared):
            group = [ticket for ticket in same if not ticket.over]
            try:
                if group:
                    first = self.engine.submit(group[0].request)
                    numbers = [first, *(self.engine.branch(first, len(group) - 1) if len(group) > 1 else ())]
                    for ticket, number in zip(group, numbers, strict=True):
                        ticket.sequence = number
                        self._by_sequence[number] = ticket
            except UserError as error:
                self._fail(group, from_user_error(error))
            except Exception as error:  # a bug; the thread must live
                self._log(f"the engine failed: {type(error).__name__}: {error}")
                self._fail(group, internal_error())

    def _leave(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._forget(ticket)
            self._end(ticket, "cancelled")

    def _fail(self, tickets: Sequence[Ticket], error: ApiError) -> None:
        """End sequences with an error, through the text thread, so that it comes after what was made."""
        for ticket in tickets:
            self._forget(ticket)
        self._steps.put([(ticket, error) for ticket in tickets])

    def _forget(self, ticket: Ticket) -> None:
        if ticket.sequence is not None and self._by_sequence.pop(ticket.sequence, None) is not None:
            self.engine.cancel(ticket.sequence)

    def _end(self, ticket: Ticket, reason: str) -> None:
        with self._lock:
            if ticket.over:
                return
            ticket.over = True
            self._tickets.discard(ticket)
        self.metrics.ended(ticket.asked, ticket.first, ticket.last, len(ticket.request.prompt), ticket.tokens, reason)

    # The text thread

    def _run_text(self) -> None:
        while (step := self._steps.get()) is not None:
            news: dict[Delivery, list[Piece | ApiError]] = {}
            for ticket, output in step:
                if not ticket.over:
                    news.setdefault(ticket.delivery, []).append(self._read(ticket, output))
            for delivery, pieces in news.items():
                delivery.put(pieces)
            if news:
                delivery.afterwards(self._told.set)
            else:
                self._told.set()

    def _read(self, ticket: Ticket, output: SequenceOutput | ApiError) -> Piece | ApiError:
        """What one output means to the client."""
        if isinstance(output, ApiError):
            self._end(ticket, "error")
            return output
        now = time.perf_counter()
        if output.tokens or output.finish_reason is not None:
            self.metrics.stepped(ticket.asked, ticket.first, ticket.last, now, len(output.tokens), output.queued)
            if output.drafted:
                self.metrics.speculated(output.drafted, output.accepted)
            ticket.first, ticket.last = ticket.first or now, now
            ticket.tokens += len(output.tokens)
        try:
            piece = ticket.reader.feed(output)
        except Exception as error:  # a bug in reading one reply is no reason to lose the others
            self._log(f"a reply could not be read: {type(error).__name__}: {error}")
            self.cancel([ticket])
            return internal_error()
        if piece.end is not None:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._orders.put(lambda: self._forget(ticket))
            self._end(ticket, "stop" if piece.end == "stop_string" else piece.end)
        return piece


def _shared(ticket: Ticket) -> object:
    """Equal for the replies of one request to one prompt; one whose prompt is scored stands alone."""
    return ticket if ticket.request.prompt_logprobs else ticket.request.prompt
