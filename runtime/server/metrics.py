"""Prometheus metrics under vLLM's names with our prefix, so that its dashboards need one substitution.

No label or value comes from a request.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mycli.runtime.cache.prefix_store import StoreStats
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.server.http.request_log import RequestFigures

PREFIX = "mycli:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        gauges = {
            "num_requests_running": ("Sequences running.", float(stats.running)),
            "num_requests_waiting": ("Sequences waiting.", float(stats.waiting)),
            "kv_cache_usage_perc": ("Fraction of the KV cache in use, 0 to 1.", stats.cache_usage),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        if stats.activations is not None:
            text = "Bits of the integers that CPU kernels round activations to, with the reason."
            bits = GaugeMetricFamily(PREFIX + "activation_bits", text, labels=["reason"])
            bits.add_metric([stats.activations.reason.code.removeprefix("activations-")], stats.activations.bits)
            yield bits
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
            "num_preemptions": ("Sequences preempted, to be recomputed later.", stats.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        misses = CounterMetricFamily(
            PREFIX + "prefix_cache_misses", "Prompts not fully in the prefix cache, by reason.", labels=["reason"]
        )
        for reason, count in stats.misses.items():  # a fixed set of reasons, without token positions
            misses.add_metric([reason], count)
        yield misses
        if stats.disk is not None:
            yield from _disk_metrics(stats.disk)


def _disk_metrics(stats: StoreStats) -> Iterable[Metric]:
    name = PREFIX + "prefix_store_"
    yield GaugeMetricFamily(name + "bytes", "Bytes of the disk prefix cache.", value=float(stats.nbytes))
    yield CounterMetricFamily(name + "read", "Cache files that a prompt reused.", value=stats.read)
    yield CounterMetricFamily(name + "written", "Cache files written.", value=stats.written)
    yield CounterMetricFamily(
        name + "skipped", "Cache files not written because the write queue was full.", value=stats.skipped
    )
    ignored = CounterMetricFamily(name + "ignored", "Unusable cache files, by reason.", labels=["reason"])
    for reason, count in stats.ignored.items():  # our reasons, or errors of the operating system
        ignored.add_metric([reason], count)
    yield ignored


class Metrics:
    """The counters and histograms of one server. Methods may be called from any thread."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        registry.register(_EngineCollector(stats))

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=_SECONDS, registry=registry)

        def counts(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=_COUNTS, registry=registry)

        self._prompt = Counter(PREFIX + "prompt_tokens", "Prompt tokens.", registry=registry)
        self._generated = Counter(PREFIX + "generation_tokens", "Generated tokens.", registry=registry)
        self._success = Counter(
            PREFIX + "request_success", "Sequences that ended.", ["finished_reason"], registry=registry
        )
        self._corrupted = Counter(PREFIX + "corrupted_requests", "Sequences that failed.", registry=registry)
        self._first = seconds("time_to_first_token_seconds", "From the request to its first token.")
        self._between = seconds("inter_token_latency_seconds", "Between two tokens of a sequence.")
        self._whole = seconds("e2e_request_latency_seconds", "From the request to its end.")
        self._queue = seconds("request_queue_time_seconds", "From the request to its first pass.")
        self._prefill = seconds("request_prefill_time_seconds", "From the first pass to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last.")
        self._per_token = seconds("request_time_per_output_token_seconds", "Mean time per token after the first.")
        self._drafts = Counter(PREFIX + "spec_decode_num_drafts", "Passes that verified a draft.", registry=registry)
        self._drafted = Counter(PREFIX + "spec_decode_num_draft_tokens", "Tokens that were drafted.", registry=registry)
        self._accepted = Counter(
            PREFIX + "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", registry=registry
        )
        # Labels are the names of the keys in this server's file, never what a client sent.
        self._key_requests = Counter(PREFIX + "key_requests", "Answered requests.", ["key"], registry=registry)
        self._key_tokens = Counter(PREFIX + "key_tokens", "Tokens of requests.", ["key", "kind"], registry=registry)
        self._key_first = Histogram(
            PREFIX + "key_time_to_first_token_seconds",
            "From the request to its first token.",
            ["key"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._prompt_size = counts("request_prompt_tokens", "Tokens per prompt.")
        self._reply_size = counts("request_generation_tokens", "Tokens per reply.")

    def stepped(
        self, submitted: float, first: float | None, last: float | None, now: float, tokens: int, queued: float
    ) -> None:
        """Count `tokens` that a sequence received at `now`, after its `first` and `last` token; times in seconds."""
        self._generated.inc(tokens)
        if first is None:
            self._first.observe(now - submitted)
            self._queue.observe(queued)
            self._prefill.observe(max(now - submitted - queued, 0.0))
        elif last is not None:
            for _ in range(tokens):
                self._between.observe((now - last) / tokens)

    def used(self, key: str, figures: RequestFigures) -> None:
        """Count an answered request of a key: its prompt and completion tokens, and its time to the first token."""
        if key:
            self._key_requests.labels(key).inc()
            self._key_tokens.labels(key, "prompt").inc(figures.prompt)
            self._key_tokens.labels(key, "cached").inc(figures.cached)
            self._key_tokens.labels(key, "completion").inc(figures.completion)
            if figures.ttft is not None:
                self._key_first.labels(key).observe(figures.ttft)

    def speculated(self, drafted: int, accepted: int) -> None:
        """Count a pass that verified `drafted` tokens and accepted `accepted`."""
        self._drafts.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)

    def ended(
        self, submitted: float, first: float | None, last: float | None, prompt: int, tokens: int, reason: str
    ) -> None:
        """Count a sequence that ended; `reason` is a `ReplyEnd`."""
        self._success.labels(reason).inc()
        if reason == "error":
            self._corrupted.inc()
        if first is None or last is None:
            return
        self._prompt.inc(prompt)
        self._whole.observe(last - submitted)
        self._decode.observe(last - first)
        if tokens > 1:
            self._per_token.observe((last - first) / (tokens - 1))
        self._prompt_size.observe(prompt)
        self._reply_size.observe(tokens)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
