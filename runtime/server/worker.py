"""Runs the engine for HTTP clients on two threads: one steps the engine, one turns tokens into text.

The engine is touched by its own thread only: submissions and cancellations reach it between steps. The text thread
feeds each `OutputReader` and passes all new pieces of a step to the event loop together, so no client delays another.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from mycli.runtime.device.system import release_free_memory
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.replies.journal import RecordedReply
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.errors import UserError, summarize_error
from mycli.runtime.kernels.cpu.threads import release_threads
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import ApiError, from_user_error, internal_error, shutting_down
from mycli.runtime.server.metrics import Metrics

# How long the next step on the CPU may wait until the tokens of the last one are delivered. Text thread and event loop
# need a core for less than that; a pass whose threads wait for a core takes longer than both one after the other.
DELIVERY_SECONDS = 0.003

# Replies after which free memory is returned to the system. The heap of a busy server is fragmented: resident memory
# grows by a kilobyte for each reply, although what is in use does not.
RELEASE_REPLIES = 1024


class OutputReader(Protocol):
    """Converts the outputs of one sequence to pieces; `index`: number of the reply."""

    @property
    def index(self) -> int: ...

    def feed(self, output: SequenceOutput) -> Piece:
        """Return what one output adds to the reply."""
        ...


@dataclass(eq=False)
class Ticket:
    """One requested reply. Times are seconds of time.perf_counter."""

    request: Request
    reader: OutputReader
    delivery: Delivery
    submitted: float = field(default_factory=time.perf_counter)
    first: float | None = None  # token
    last: float | None = None
    sequence: int | None = None  # number in the engine, once submitted there
    over: bool = False
    tokens: int = 0
    recorded: RecordedReply | None = None


class EngineWorker:
    """Runs an engine for many clients; `log` receives internal errors.

    A thread that ends by an error fails all replies; `on_death` is then called once, from that thread.
    """

    def __init__(
        self, engine: Engine, max_waiting: int, log: Callable[[str], None], on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.metrics = Metrics(lambda: self.stats)
        self._max_waiting, self._log, self._on_death = max_waiting, log, on_death
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._calls = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[list[tuple[Ticket, SequenceOutput | ApiError]] | None] = queue.SimpleQueue()
        self._delivered = threading.Event()  # the event loop has seen the tokens of the last step
        self._by_sequence: dict[int, Ticket] = {}  # used by the engine thread only
        self._threads = [
            threading.Thread(target=self._run, args=(self._run_engine,), name="engine", daemon=True),
            threading.Thread(target=self._run, args=(self._run_text,), name="text", daemon=True),
        ]
        self.stats = engine.stats  # a copy after each step: the engine itself belongs to its thread
        self.failed = ""  # why the engine cannot run any more
        self.dead = False  # a thread has ended by an error

    def start(self) -> None:
        """Start both threads. The calling thread must not use the engine afterwards."""
        release_threads()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads without finishing replies."""
        self._commands.put(None)
        if self.dead:  # the engine thread may not pass this on
            self._outputs.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    @property
    def underway(self) -> int:
        """Number of replies that were requested and have not ended."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Number of replies without a first token."""
        with self._lock:
            return self._count_waiting()

    def _count_waiting(self) -> int:
        return sum(ticket.first is None for ticket in self._tickets)

    def submit(
        self,
        requests: Sequence[tuple[Request, Sequence[OutputReader]]],
        delivery: Delivery,
        records: Mapping[int, RecordedReply] = MappingProxyType({}),
    ) -> list[Ticket]:
        """Queue one reply per reader to each request; the seed of reply i is the request's seed + i.

        records: where replies are recorded, by the index of their reader.

        Raises ApiError if the queue is full or the engine has failed.
        """
        if self.failed:
            raise self._failure()
        call = f"call {next(self._calls)}"  # its prompts take turns with other requests as one
        groups = [
            [Ticket(request, reader, delivery, recorded=records.get(reader.index)) for reader in readers]
            for request, readers in ((replace(request, group=call), readers) for request, readers in requests)
        ]
        tickets = [ticket for group in groups for ticket in group]
        with self._lock:
            waiting, counted = self._count_waiting(), "replies"
            if len(tickets) == 1:  # not refused because another request waits for many replies
                waiting = len({ticket.delivery for ticket in self._tickets if ticket.first is None})
                counted = "requests"
            # A request with more replies than the limit is accepted by an idle server.
            if waiting and waiting + len(tickets) > self._max_waiting:
                message = f"queue full: {waiting} {counted} are waiting, at most {self._max_waiting} may"
                raise ApiError(429, message, "queue_full", headers={"retry-after": "5"})
            self._tickets.update(tickets)
        if self.dead:  # it died after the check above, and has not seen these tickets
            for ticket in tickets:
                self._end(ticket, "error")
            raise self._failure()

        def enter() -> None:
            for group in groups:
                self._enter(group)

        self._commands.put(enter)
        return tickets

    def _failure(self) -> ApiError:
        return ApiError(503, f"the engine has failed: {self.failed}", "engine_failed")

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Stop replies whose client has disconnected."""
        left = [ticket for ticket in tickets if not ticket.over]
        if left:
            self._commands.put(lambda: self._leave(left))

    def cancel_all(self) -> None:
        """End all replies with an error: the server shuts down."""
        with self._lock:
            tickets = list(self._tickets)
        self._commands.put(lambda: self._fail(tickets, shutting_down()))

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # a Rust panic is not an Exception
            self._die(error)

    def _die(self, error: BaseException) -> None:
        name = threading.current_thread().name
        self.failed = f"the {name} thread ended: {summarize_error(error)}"
        self.dead = True
        with self._lock:
            tickets = list(self._tickets)
        self._log(self.failed)
        for ticket in tickets:
            self._end(ticket, "error")
            ticket.delivery.put([internal_error()])
        self._on_death()

    # Engine thread

    def _run_engine(self) -> None:
        while True:
            commands = [] if self.engine.has_work else [self._commands.get()]
            # Only those that are in the queue now: under constant load a step must still come.
            commands += [self._commands.get() for _ in range(self._commands.qsize())]
            for command in commands:
                if command is None:
                    self._outputs.put(None)
                    return
                command()
            if self.engine.has_work:
                self._step()
            self.stats = self.engine.stats

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # a bug or a lost device: fail these replies, keep the server running
            self._log(f"engine step failed: {type(error).__name__}: {error}")
            if type(error).__name__ == "AcceleratorError":  # torch: the CUDA context is unusable afterwards
                self.failed = str(error).splitlines()[0][:200]
            self._fail(list(self._by_sequence.values()), internal_error())
            self.engine.forget()  # the pass may have left wrong keys and values in the cache
            return
        pairs: list[tuple[Ticket, SequenceOutput | ApiError]] = []
        for output in outputs:
            ticket = self._by_sequence.get(output.sequence)
            if ticket is not None:
                pairs.append((ticket, output))
                if output.finish_reason is not None:
                    del self._by_sequence[output.sequence]
        if pairs:
            self._delivered.clear()
            self._outputs.put(pairs)
            if self.engine.shares_cores:
                self._delivered.wait(DELIVERY_SECONDS)

    def _enter(self, tickets: Sequence[Ticket]) -> None:
        tickets = [ticket for ticket in tickets if not ticket.over]
        try:
            numbers = self.engine.submit_replies(tickets[0].request, len(tickets)) if tickets else []
        except UserError as error:
            self._fail(tickets, from_user_error(error))
        except Exception as error:  # a bug must not end the thread
            self._log(f"engine submit failed: {type(error).__name__}: {error}")
            self._fail(tickets, internal_error())
        else:
            for ticket, number in zip(tickets, numbers, strict=True):
                ticket.sequence = number
                self._by_sequence[number] = ticket

    def _leave(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._cancel(ticket)
            self._end(ticket, "cancelled")

    def _fail(self, tickets: Sequence[Ticket], error: ApiError) -> None:
        for ticket in tickets:
            self._cancel(ticket)
        self._outputs.put([(ticket, error) for ticket in tickets])  # behind the outputs that came before the error

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.sequence is not None and self._by_sequence.pop(ticket.sequence, None) is not None:
            self.engine.cancel(ticket.sequence)

    def _end(self, ticket: Ticket, reason: str) -> None:
        with self._lock:
            if ticket.over:
                return
            ticket.over = True
            self._tickets.discard(ticket)
        prompt = len(ticket.request.prompt)
        self.metrics.ended(ticket.submitted, ticket.first, ticket.last, prompt, ticket.tokens, reason)

    # Text thread

    def _run_text(self) -> None:
        ended = 0
        while (pairs := self._outputs.get()) is not None:
            pieces: dict[Delivery, list[Piece | ApiError]] = {}
            for ticket, output in pairs:
                if not ticket.over:
                    pieces.setdefault(ticket.delivery, []).append(self._read(ticket, output))
            for delivery, news in pieces.items():
                delivery.put(news)
            if pieces:
                delivery.afterwards(self._delivered.set)
            else:
                self._delivered.set()
            ended += sum(ticket.over for ticket, _ in pairs)
            if ended >= RELEASE_REPLIES:
                release_free_memory()
                ended = 0

    def _read(self, ticket: Ticket, output: SequenceOutput | ApiError) -> Piece | ApiError:
        if isinstance(output, ApiError):
            self._end(ticket, "error")
            return output
        if ticket.recorded is not None:
            ticket.recorded.append(output)  # before a client sees it
        now = time.perf_counter()
        if output.tokens or output.finish_reason is not None:
            self.metrics.stepped(ticket.submitted, ticket.first, ticket.last, now, len(output.tokens), output.queued)
            if output.drafted:
                self.metrics.speculated(output.drafted, output.accepted)
            ticket.first, ticket.last = ticket.first or now, now
            ticket.tokens += len(output.tokens)
        try:
            piece = ticket.reader.feed(output)
        except BaseException as error:  # a bug, or a panic of the tokenizer, in one reply must not end the others
            self._log(f"reading a reply failed: {type(error).__name__}: {error}")
            self.cancel([ticket])
            return internal_error()
        if piece.end is not None:
            if output.finish_reason is None:  # a stop string, which the engine does not see
                self._commands.put(lambda: self._cancel(ticket))
            self._end(ticket, "stop" if piece.end == "stop_string" else piece.end)
        return piece
