"""Compares a server's time to the first token with and without a cached prefix.

    python -m tests.benchmarks.prefix_times URL [--turns 20] [--turn 64] [--shared 8000] [--own 64] [--asked 4]

A conversation: each prompt is the last one plus `turn` tokens. An agent: `asked` prompts, each with the same `shared`
tokens and `own` others. Each is paired with a prompt of the same length of which nothing is cached. Works with any
server that implements OpenAI's completions; prints the number of cached tokens where the server reports it.
"""

import argparse
import random
import secrets
import statistics
from collections.abc import Sequence

from mycli.runtime.diagnostics.completion_client import CompletionServer, Reply
from mycli.runtime.diagnostics.serving_load import tokens_per_word

REPLY = 4  # tokens
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


class Texts:
    """Generates texts of about a given number of tokens that are not in any cache."""

    def __init__(self, per_word: float) -> None:
        self._per_word, self._random = per_word, random.Random(secrets.randbits(64))

    def make(self, tokens: int) -> str:
        """Return a text with a unique beginning."""
        return "".join(" " + self._random.choice(WORDS) for _ in range(round(tokens / self._per_word)))


def ask(server: CompletionServer, prompt: str) -> Reply:
    """Return the times of one reply. Raises SystemExit if the request fails."""
    found = server.reply(prompt.strip(), REPLY)
    if found.problem:
        raise SystemExit(f"{server.url}: {found.problem}")
    return found


def show(name: str, kept: Sequence[Reply], fresh: Sequence[Reply]) -> None:
    """Print a line for each pair of replies, and the medians of all but the first."""
    for number, (one, other) in enumerate(zip(kept, fresh, strict=True), start=1):
        times = f"{1e3 * one.first_token_seconds:8.1f} ms, {1e3 * other.first_token_seconds:8.1f} where all is new"
        print(f"{name} {number:3}: {one.prompt:6} tokens, {one.cached:6} in the cache: {times}", flush=True)
    medians = [1e3 * statistics.median(each.first_token_seconds for each in replies[1:]) for replies in (kept, fresh)]
    print(f"{name}: median from the second on {medians[0]:.1f} ms, {medians[1]:.1f} where all is new", flush=True)


def main() -> None:
    """Measure the server at the address."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for name, value in (("turns", 20), ("turn", 64), ("shared", 8000), ("own", 64), ("asked", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    server = CompletionServer(chosen.url)
    texts = Texts(tokens_per_word(server))
    said, kept, fresh = "", list[Reply](), list[Reply]()
    for turn in range(1, chosen.turns + 1):
        said += texts.make(chosen.turn)
        kept.append(ask(server, said))
        fresh.append(ask(server, texts.make(turn * chosen.turn)))
    show("turn", kept, fresh)
    shared, kept, fresh = texts.make(chosen.shared), [], []
    for _ in range(chosen.asked):
        kept.append(ask(server, shared + texts.make(chosen.own)))
        fresh.append(ask(server, texts.make(chosen.shared + chosen.own)))
    show("agent", kept, fresh)


if __name__ == "__main__":
    main()
