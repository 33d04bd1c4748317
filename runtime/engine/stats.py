"""Statistics of a reply and of an engine: token counts, seconds, and acceptance of drafts."""

from dataclasses import dataclass, field

from mycli.runtime.cache.prefix_store import StoreStats


@dataclass
class SpeculationStats:
    """Speculation in one reply."""

    passes: int = 0  # that verified a draft
    drafted: int = 0  # tokens
    compared: int = 0  # draft tokens up to the first refusal, that one included
    accepted: int = 0
    step_seconds: float | None = None  # of a step without drafts, None if none was measured

    def add(self, drafted: int, accepted: int) -> None:
        self.passes += 1
        self.drafted += drafted
        self.compared += min(accepted + 1, drafted)
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float:
        """The share of compared draft tokens that were accepted."""
        return self.accepted / self.compared if self.compared else 0.0

    @property
    def mean_length(self) -> float:
        """Mean number of tokens of a pass that verified a draft, its own token included."""
        return 1 + self.accepted / self.passes if self.passes else 1.0


@dataclass
class Timing:
    """Token counts and times of one reply, in seconds of a monotonic clock."""

    prompt: int = 0
    cached: int = 0
    token_seconds: list[float] = field(
        default_factory=list
    )  # one for each sampled token; the first includes the prompt
    record: SpeculationStats | None = None  # None without speculation
    waited: float = 0.0  # seconds since the last token

    def add(self, tokens: int, seconds: float) -> None:
        """Record a step; its tokens share the time since the last token."""
        self.waited += seconds
        if tokens:
            self.token_seconds += [self.waited / tokens] * tokens
            self.waited = 0.0

    @property
    def generated(self) -> int:
        """Number of sampled tokens, a stop token included."""
        return len(self.token_seconds)

    @property
    def first_token_seconds(self) -> float:
        return self.token_seconds[0] if self.token_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate without the first token, which includes the prompt; 0 without a second token."""
        decoding = sum(self.token_seconds[1:])
        return (self.generated - 1) / decoding if decoding > 0 else 0.0

    @property
    def speedup(self) -> float | None:
        """Time of as many steps without drafts over the time of decoding; None if that is not known."""
        step = self.record.step_seconds if self.record else None
        return step * self.tokens_per_second if step and self.generated > 1 else None


@dataclass(frozen=True)
class EngineStats:
    """The current load of an engine and its totals since the start."""

    running: int  # sequences
    waiting: int
    preemptions: int  # total
    cache_used: int  # blocks of sequences
    cache_kept: int  # blocks kept for prefix reuse
    cache_blocks: int
    prefix_queries: int  # prompt tokens, total
    prefix_hits: int  # prompt tokens found in the cache
    misses: dict[str, int]  # prompts by the reason why no more tokens were found
    kept: StoreStats | None = None  # of the disk prefix cache

    @property
    def cache_usage(self) -> float:
        """The share of blocks that sequences use."""
        return self.cache_used / self.cache_blocks
