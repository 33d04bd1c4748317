"""A load generator for completion servers.

Closed load: a fixed number of clients, each with one request at a time. Open load: Poisson arrivals at a fixed rate.
Prompts are text, so that any server can be measured; token counts are the server's.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mycli.runtime.diagnostics.completion_client import CompletionServer, Reply
from mycli.runtime.errors import ModelError

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
CHECK_SECONDS = 1.0  # between two checks whether to end a run early
_MEASURED = 4, 24  # words of the two texts that measure tokens per word


@dataclass(frozen=True)
class Load:
    """Requests of `prompt` tokens, the first `shared` the same in all, for replies of `reply` tokens.

    Exactly one of `clients` (concurrent requests) and `rate` (requests per second) is set.
    """

    prompt: int
    reply: int
    requests: int
    shared: int = 0
    clients: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise ValueError("set either clients or rate")

    @property
    def name(self) -> str:
        kind = f"c{self.clients}" if self.clients is not None else f"r{self.rate:g}"
        return f"{kind} p{self.prompt}" + (f"/{self.shared}" if self.shared else "") + f" n{self.reply}"


@dataclass(frozen=True)
class LoadResult:
    """One run of a load. `counted`: the increase of the server's counters, by name without prefix."""

    load: Load
    replies: tuple[Reply, ...]
    seconds: float
    counted: Mapping[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> list[Reply]:
        return [reply for reply in self.replies if not reply.problem]

    @property
    def rate(self) -> float:
        return sum(reply.tokens for reply in self.answered) / self.seconds

    @property
    def queue_seconds(self) -> float | None:
        count = self.counted.get("request_queue_time_seconds_count", 0)
        return self.counted["request_queue_time_seconds_sum"] / count if count else None


class Texts:
    """Random prompts of about `load.prompt` tokens; `per_word`: tokens per word."""

    def __init__(self, load: Load, per_word: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._distinct = max(1, round((load.prompt - load.shared) / per_word))
        self._shared = self._text(round(load.shared / per_word))

    def _text(self, words: int) -> str:
        return "".join(" " + self._random.choice(_WORDS) for _ in range(words))

    def next(self) -> str:
        """Return the shared text followed by one of its own."""
        return (self._shared + self._text(self._distinct)).strip()


def tokens_per_word(server: CompletionServer) -> float:
    """Measure the tokens per word of `Texts`. Raises ModelError if the server does not reply or does not count."""
    # The difference of two texts: tokens that the server adds to both, such as BOS, cancel out.
    generator, counts = random.Random(0), []
    for words in _MEASURED:
        answer = server.reply(" ".join(generator.choice(_WORDS) for _ in range(words)), 1)
        if answer.problem:
            raise ModelError(
                f"{server.url}: {answer.problem}", "the server must be idle and have OpenAI's /v1/completions"
            )
        counts.append(answer.prompt)
    if counts[1] <= counts[0]:
        raise ModelError(f"{server.url} does not report prompt tokens", "its streams must include usage")
    return (counts[1] - counts[0]) / (_MEASURED[1] - _MEASURED[0])


def run_load(
    server: CompletionServer,
    load: Load,
    per_word: float,
    seed: int,
    progress: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Send every request of `load`.

    `progress` is called after each reply, from any thread; `check` meanwhile from the caller's, where it may raise.
    """
    texts = Texts(load, per_word, seed)
    prompts = [texts.next() for _ in range(load.requests)]
    replies: list[Reply] = []
    before, began = server.counters(), time.monotonic()

    def send(prompt: str) -> None:
        replies.append(server.reply(prompt, load.reply))
        progress()

    if load.clients is not None:
        _run_closed(prompts, min(load.clients, load.requests), send, check)
    else:
        assert load.rate is not None
        _run_open(prompts, load.rate, random.Random(seed), send, check)
    seconds = max((reply.last for reply in replies if not reply.problem), default=time.monotonic()) - began
    after = server.counters()
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return LoadResult(load, tuple(replies), seconds, counted)


def _run_closed(prompts: Sequence[str], clients: int, send: Callable[[str], None], check: Callable[[], None]) -> None:
    left, lock = iter(prompts), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            send(prompt)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    _start_and_join(threads, itertools.repeat(0.0), check)


def _run_open(
    prompts: Sequence[str],
    rate: float,
    generator: random.Random,
    send: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    threads = [threading.Thread(target=send, args=(prompt,), daemon=True) for prompt in prompts]
    _start_and_join(threads, (generator.expovariate(rate) for _ in threads), check)


def _start_and_join(threads: Sequence[threading.Thread], pauses: Iterable[float], check: Callable[[], None]) -> None:
    # Each thread starts at a time of its own: a slow start of one does not delay the next.
    due = time.monotonic()
    for thread, pause in zip(threads, pauses, strict=False):
        due += pause
        while (wait := due - time.monotonic()) > 0:
            check()
            time.sleep(min(wait, CHECK_SECONDS))
        thread.start()
    for thread in threads:
        while thread.is_alive():
            check()
            thread.join(CHECK_SECONDS)
