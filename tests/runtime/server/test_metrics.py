"""Test metrics against sums computed by hand."""

from mycli.runtime.cache.prefix_store import StoreStats
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.quantization.activations import choose_by_file
from mycli.runtime.server.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_time_to_the_first_token_is_the_queue_and_the_prefill() -> None:
    metrics = Metrics(
        lambda: EngineStats(1, 2, 3, 4, 10, 60, 20, {"no cached sequence has the same first token": 2, "evicted": 1})
    )
    metrics.stepped(submitted=10.0, first=None, last=None, now=14.0, tokens=1, queued=3.0)
    metrics.stepped(submitted=10.0, first=14.0, last=14.0, now=15.0, tokens=2, queued=3.0)
    metrics.speculated(4, 1)
    metrics.speculated(2, 2)
    metrics.ended(10.0, 14.0, 15.0, 7, 3, "stop")
    found = {name.removeprefix("mycli:"): value for name, value in values(metrics).items()}
    assert found["time_to_first_token_seconds_sum"] == 4 and found["request_queue_time_seconds_sum"] == 3
    assert found["request_prefill_time_seconds_sum"] == 1 and found["request_prefill_time_seconds_count"] == 1
    assert found["request_decode_time_seconds_sum"] == 1
    assert found["inter_token_latency_seconds_sum"] == 1 and found["inter_token_latency_seconds_count"] == 2
    assert found['prefix_cache_misses_total{reason="no cached sequence has the same first token"}'] == 2
    assert found['prefix_cache_misses_total{reason="evicted"}'] == 1
    drafts = [found[f"spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert drafts == [2, 6, 3]
    assert found["kv_cache_usage_perc"] == 0.4 and found["num_preemptions_total"] == 3


def test_a_reply_that_is_cancelled_at_its_first_token_has_no_times() -> None:
    """Another thread may end it between the two assignments of the times of its first and its last token."""
    metrics = Metrics(lambda: EngineStats(0, 0, 0, 0, 1, 0, 0, {}))
    for first in (None, 14.0):
        metrics.ended(10.0, first, None, 7, 1, "abort")
    found = values(metrics)
    assert found['mycli:request_success_total{finished_reason="abort"}'] == 2
    assert found["mycli:e2e_request_latency_seconds_count"] == found["mycli:prompt_tokens_total"] == 0


def test_activation_bits_have_their_reason() -> None:
    choice = choose_by_file(0.0002)
    metrics = Metrics(lambda: EngineStats(0, 0, 0, 0, 1, 0, 0, {}, activations=choice))
    assert values(metrics)['mycli:activation_bits{reason="move"}'] == 8


def test_the_disk_prefix_cache_has_its_counts() -> None:
    disk = StoreStats(read=2, written=3, skipped=4, ignored={"damaged": 5, "of other weights": 6}, nbytes=7)
    metrics = Metrics(lambda: EngineStats(0, 0, 0, 0, 1, 0, 0, {}, disk=disk))
    prefix = "mycli:prefix_store_"
    figures = {name.removeprefix(prefix): value for name, value in values(metrics).items() if name.startswith(prefix)}
    assert figures == {
        **{"bytes": 7, "read_total": 2, "written_total": 3, "skipped_total": 4},
        **{'ignored_total{reason="damaged"}': 5, 'ignored_total{reason="of other weights"}': 6},
    }
