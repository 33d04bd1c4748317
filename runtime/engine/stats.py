"""Counts and times of one generation and of an engine."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mycli.runtime.cache.prefix_store import StoreStats
    from mycli.runtime.quantization.activations import ActivationChoice


@dataclass
class SpeculationStats:
    """Counts of speculative decoding in one reply.

    passes: verified a draft; compared: draft tokens up to the first rejected one; step_seconds: of one step without
    a draft on this machine, None if not measured.
    """

    passes: int = 0
    drafted: int = 0
    compared: int = 0
    accepted: int = 0
    step_seconds: float | None = None

    def add(self, drafted: int, accepted: int) -> None:
        self.passes += 1
        self.drafted += drafted
        # The first rejected token is compared too; those after it are not.
        self.compared += min(accepted + 1, drafted)
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.compared if self.compared else 0.0

    @property
    def mean_length(self) -> float:
        return 1 + self.accepted / self.passes if self.passes else 1.0


@dataclass
class Counts:
    """Totals of a scheduler since the start.

    queries, hits: prompt tokens looked up in the prefix cache, and found there; misses: prompts by cause.
    """

    preemptions: int = 0
    queries: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)


@dataclass
class Timing:
    """Token counts and times of one generation, in seconds of a monotonic clock."""

    prompt: int = 0
    cached: int = 0
    token_seconds: list[float] = field(default_factory=list)  # one per sampled token; the first includes the prefill
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
        """Sampled tokens, including the stop token."""
        return len(self.token_seconds)

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the request to the first token."""
        return self.token_seconds[0] if self.token_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without the first token, which belongs to the prefill; 0 if only one was sampled."""
        decoding = sum(self.token_seconds[1:])
        return (self.generated - 1) / decoding if decoding > 0 else 0.0

    @property
    def speedup(self) -> float | None:
        """How much faster speculation decoded than plain steps would have; None if unknown."""
        step = self.record.step_seconds if self.record else None
        return step * self.tokens_per_second if step and self.generated > 1 else None


@dataclass(frozen=True)
class EngineStats:
    """The current load of an engine, and its counts since it was created.

    prefix_queries, prefix_hits: prompt tokens, and how many were cached; misses: prompts that were not fully cached,
    by reason; disk: of the disk prefix cache, None without one; activations: how CPU kernels round activations, None if
    they do not.
    """

    running: int
    waiting: int
    preemptions: int
    cache_used: int  # blocks in use by sequences
    cache_blocks: int
    prefix_queries: int
    prefix_hits: int
    misses: dict[str, int]
    disk: "StoreStats | None" = None
    activations: "ActivationChoice | None" = None

    @property
    def cache_usage(self) -> float:
        return self.cache_used / self.cache_blocks
