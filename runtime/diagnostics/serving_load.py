"""How a server fares under load: streams of OpenAI's completions by many clients, timed as they see them.

Closed load keeps a number of clients busy; open load sends requests at a rate, whether or not others have been answered
(arrivals of a Poisson process). Prompts are texts, so that any server can be measured, and tokens are as many as it
says. Knows threads and clocks; does not know HTTP or models, and does not print.
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
_MEASURED = 4, 24  # words of the two texts that tell how many tokens a word is


@dataclass(frozen=True)
class Load:
    """Requests of `prompt` tokens, of which the first `shared` are those of all others, for replies of `reply` tokens.

    clients: so many wait for a reply at any time; rate: so many requests a second. Exactly one of them is not None.
    """

    prompt: int
    reply: int
    requests: int
    shared: int = 0
    clients: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise ValueError("either clients or a rate")

    @property
    def name(self) -> str:
        who = f"c{self.clients}" if self.clients is not None else f"r{self.rate:g}"
        return f"{who} p{self.prompt}" + (f"/{self.shared}" if self.shared else "") + f" n{self.reply}"


@dataclass(frozen=True)
class LoadResult:
    """One run of a load. `counted`: what the server's own counters rose by, by their names behind the prefix."""

    load: Load
    replies: tuple[Reply, ...]
    seconds: float
    counted: Mapping[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> list[Reply]:
        return [one for one in self.replies if not one.problem]

    @property
    def rate(self) -> float:
        return sum(one.tokens for one in self.answered) / self.seconds

    @property
    def queue_seconds(self) -> float | None:
        count = self.counted.get("request_queue_time_seconds_count", 0)
        return self.counted["request_queue_time_seconds_sum"] / count if count else None


class Texts:
    """Prompts of about so many tokens. `per_word`: tokens that a word makes."""

    def __init__(self, load: Load, per_word: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._own = max(1, round((load.prompt - load.shared) / per_word))
        self._shared = self._text(round(load.shared / per_word))

    def _text(self, words: int) -> str:
        return "".join(" " + self._random.choice(_WORDS) for _ in range(words))

    def next(self) -> str:
        """Another one: what is shared, and then a text that no other has."""
        return (self._shared + self._text(self._own)).strip()


def tokens_per_word(server: CompletionServer) -> float:
    """How many tokens the words of `Texts` take, by the server's count of two texts: what it adds itself is no word's.

    Raises ModelError where it does not answer or does not count.
    """
    chance, counts = random.Random(0), []
    for words in _MEASURED:
        answer = server.reply(" ".join(chance.choice(_WORDS) for _ in range(words)), 1)
        if answer.problem:
            raise ModelError(f"{server.url}: {answer.problem}", "it must have room, and OpenAI's /v1/completions")
        counts.append(answer.prompt)
    if counts[1] <= counts[0]:
        raise ModelError(f"{server.url} does not count the tokens of a prompt", "its streams must have a usage")
    return (counts[1] - counts[0]) / (_MEASURED[1] - _MEASURED[0])


def run_load(
    server: CompletionServer, load: Load, per_word: float, seed: int, progress: Callable[[], None] = lambda: None
) -> LoadResult:
    """One run: every request of `load`, each with a text of its own. `progress` is called after each, by any thread."""
    texts = Texts(load, per_word, seed)
    prompts = [texts.next() for _ in range(load.requests)]
    replies: list[Reply] = []
    before, began = server.counters(), time.monotonic()

    def ask(prompt: str) -> None:
        replies.append(server.reply(prompt, load.reply))
        progress()

    if load.clients is not None:
        _closed(prompts, min(load.clients, load.requests), ask)
    else:
        assert load.rate is not None
        _open_load(prompts, load.rate, random.Random(seed), ask)
    seconds = max((one.last for one in replies if not one.problem), default=time.monotonic()) - began
    after = server.counters()
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return LoadResult(load, tuple(replies), seconds, counted)


def _closed(prompts: Sequence[str], clients: int, ask: Callable[[str], None]) -> None:
    left, lock = iter(prompts), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            ask(prompt)

    _joined([threading.Thread(target=client, daemon=True) for _ in range(clients)], itertools.repeat(0.0))


def _open_load(prompts: Sequence[str], rate: float, chance: random.Random, ask: Callable[[str], None]) -> None:
    threads = [threading.Thread(target=ask, args=(prompt,), daemon=True) for prompt in prompts]
    _joined(threads, (chance.expovariate(rate) for _ in threads))


def _joined(threads: Sequence[threading.Thread], pauses: Iterable[float]) -> None:
    due = time.monotonic()
    for thread, pause in zip(threads, pauses, strict=False):
        due += pause
        time.sleep(max(0.0, due - time.monotonic()))
        thread.start()
    for thread in threads:
        thread.join()
