"""What a generation and an engine did: counts of tokens, seconds, and how drafts fared.

Numbers only. Does not know models or clocks.
"""

from dataclasses import dataclass, field

from mycli.runtime.cache.prefix_store import StoreStats


@dataclass
class SpeculationStats:
    """What speculation did in one reply.

    `passes` verified a draft; of the `drafted` tokens `compared` were looked at, up to the first refusal, and
    `accepted` stood. `step_seconds`: of a plain step on this machine, None where none was measured.
    """

    passes: int = 0
    drafted: int = 0
    compared: int = 0
    accepted: int = 0
    step_seconds: float | None = None

    def add(self, drafted: int, accepted: int) -> None:
        """One more pass."""
        self.passes += 1
        self.drafted += drafted
        self.compared += min(accepted + 1, drafted)
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float:
        """The share of the compared tokens that were accepted."""
        return self.accepted / self.compared if self.compared else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens of a pass that verified a draft, its own included."""
        return 1 + self.accepted / self.passes if self.passes else 1.0


@dataclass
class Timing:
    """What one generation did: counts in tokens per sequence, times in seconds of a monotonic clock."""

    prompt: int = 0
    cached: int = 0
    token_seconds: list[float] = field(default_factory=list)  # one per drawn token; the first holds the prefill
    record: SpeculationStats | None = None  # of speculation, where it is used
    waited: float = 0.0  # seconds since the last token

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many seconds made so many tokens, which share the time since the last one."""
        self.waited += seconds
        if tokens:
            self.token_seconds += [self.waited / tokens] * tokens
            self.waited = 0.0

    @property
    def generated(self) -> int:
        """Tokens drawn, a stop token included."""
        return len(self.token_seconds)

    @property
    def first_token_seconds(self) -> float:
        """From the request to the first token."""
        return self.token_seconds[0] if self.token_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token belongs to the prefill and is left out. 0 where there was no second."""
        decoding = sum(self.token_seconds[1:])
        return (self.generated - 1) / decoding if decoding > 0 else 0.0

    @property
    def speedup(self) -> float | None:
        """Of decoding, by speculation: the time of as many plain steps over the time it took. None if not known."""
        step = self.record.step_seconds if self.record else None
        return step * self.tokens_per_second if step and self.generated > 1 else None


@dataclass(frozen=True)
class EngineStats:
    """How an engine is doing. Counts since it was made, but for what runs, what waits and what is used, which are now.

    prefix_queries, prefix_hits: tokens of prompts, and those of them that were in the cache; misses: prompts by the
    reason why not more was; kept: what is kept in a folder over restarts, None for nothing.
    """

    running: int
    waiting: int
    preemptions: int
    cache_used: int  # blocks that sequences hold
    cache_kept: int  # blocks that are kept for texts that begin alike
    cache_blocks: int
    prefix_queries: int
    prefix_hits: int
    misses: dict[str, int]
    kept: StoreStats | None = None

    @property
    def cache_usage(self) -> float:
        """The share of the cache that sequences hold."""
        return self.cache_used / self.cache_blocks
