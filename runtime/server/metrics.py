"""What is counted for Prometheus: vLLM's names with our own prefix, so that its dashboards need one substitution.

No label and no value comes from a request. Does not know routes or engines beyond their `EngineStats`.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mycli.runtime.cache.prefix_store import StoreStats
from mycli.runtime.engine.stats import EngineStats

PREFIX = "mycli:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class _Load(Collector):
    """The engine's own numbers, asked for when they are scraped."""

    def __init__(self, load: Callable[[], EngineStats]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        gauges = {
            "num_requests_running": ("Sequences running.", float(load.running)),
            "num_requests_waiting": ("Sequences waiting.", float(load.waiting)),
            "kv_cache_usage_perc": ("Share of the cache in use, 0 to 1.", load.cache_usage),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        counters = {
            "prefix_cache_queries": ("Tokens of prompts looked up in the cache.", load.prefix_queries),
            "prefix_cache_hits": ("Tokens of prompts found there.", load.prefix_hits),
            "num_preemptions": ("Sequences put back to be computed again.", load.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        misses = CounterMetricFamily(
            PREFIX + "prefix_cache_misses", "Prompts that were not whole in the cache, by reason.", labels=["reason"]
        )
        for reason, count in load.misses.items():  # a few sentences of our own, the positions left out
            misses.add_metric([reason], count)
        yield misses
        if load.kept is not None:
            yield from _of_store(load.kept)


def _of_store(kept: StoreStats) -> Iterable[Metric]:
    """What is kept over restarts."""
    name = PREFIX + "prefix_store_"
    yield GaugeMetricFamily(name + "bytes", "Bytes of the files that keep prefixes.", value=float(kept.nbytes))
    yield CounterMetricFamily(name + "read", "Files that a prompt continued from.", value=kept.read)
    yield CounterMetricFamily(name + "written", "Files written.", value=kept.written)
    yield CounterMetricFamily(name + "skipped", "Files not written, as too many waited.", value=kept.skipped)
    ignored = CounterMetricFamily(name + "ignored", "Unusable files, by reason.", labels=["reason"])
    for reason, count in kept.ignored.items():  # words of our own, and of the operating system
        ignored.add_metric([reason], count)
    yield ignored


class Metrics:
    """Counters and histograms of one server; methods may be called from any thread."""

    def __init__(self, load: Callable[[], EngineStats]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        registry.register(_Load(load))

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=_SECONDS, registry=registry)

        def counts(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=_COUNTS, registry=registry)

        self._prompt = Counter(PREFIX + "prompt_tokens", "Tokens of prompts.", registry=registry)
        self._generated = Counter(PREFIX + "generation_tokens", "Tokens of replies.", registry=registry)
        self._success = Counter(
            PREFIX + "request_success", "Sequences that ended.", ["finished_reason"], registry=registry
        )
        self._corrupted = Counter(PREFIX + "corrupted_requests", "Sequences that failed.", registry=registry)
        self._first = seconds("time_to_first_token_seconds", "From the request to its first token.")
        self._between = seconds("inter_token_latency_seconds", "Between two tokens of a sequence.")
        self._whole = seconds("e2e_request_latency_seconds", "From the request to its end.")
        self._queue = seconds("request_queue_time_seconds", "From the request to its first turn.")
        self._prefill = seconds("request_prefill_time_seconds", "From the first turn to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last.")
        self._per_token = seconds("request_time_per_output_token_seconds", "Mean time of a token after the first.")
        self._drafts = Counter(PREFIX + "spec_decode_num_drafts", "Passes that verified a draft.", registry=registry)
        self._drafted = Counter(PREFIX + "spec_decode_num_draft_tokens", "Tokens that were drafted.", registry=registry)
        self._accepted = Counter(
            PREFIX + "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", registry=registry
        )
        self._prompt_size = counts("request_prompt_tokens", "Tokens of a prompt.")
        self._reply_size = counts("request_generation_tokens", "Tokens per reply.")

    def stepped(
        self, asked: float, first: float | None, last: float | None, now: float, tokens: int, queued: float
    ) -> None:
        """A sequence asked for at `asked` got `tokens`; its first and last before came at `first` and `last`.

        It waited `queued` seconds for its first turn.
        """
        self._generated.inc(tokens)
        if first is None:
            self._first.observe(now - asked)
            self._queue.observe(queued)
            self._prefill.observe(max(now - asked - queued, 0.0))
        elif last is not None and tokens:
            for _ in range(tokens):
                self._between.observe((now - last) / tokens)

    def speculated(self, drafted: int, accepted: int) -> None:
        """A pass verified `drafted` tokens, of which `accepted` stood."""
        self._drafts.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)

    def ended(
        self, asked: float, first: float | None, last: float | None, prompt: int, tokens: int, reason: str
    ) -> None:
        """A sequence ended for `reason`, one of a few words."""
        self._success.labels(reason).inc()
        if reason == "error":
            self._corrupted.inc()
        if first is None or last is None:
            return
        self._prompt.inc(prompt)
        self._whole.observe(last - asked)
        self._decode.observe(last - first)
        if tokens > 1:
            self._per_token.observe((last - first) / (tokens - 1))
        self._prompt_size.observe(prompt)
        self._reply_size.observe(tokens)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
