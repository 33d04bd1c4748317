"""Test metrics against sums computed by hand."""

from mycli.runtime.cache.prefix_store import StoreStats
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.quantization.activations import choose_by_file
from mycli.runtime.server.http.request_log import RequestFigures
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


def empty() -> Metrics:
    return Metrics(lambda: EngineStats(0, 0, 0, 0, 1, 0, 0, {}))


def test_replies_that_ended_have_their_times_and_sizes() -> None:
    metrics = empty()
    metrics.ended(10.0, 11.0, 14.0, 7, 4, "stop")
    metrics.ended(10.0, 12.0, 14.0, 9, 2, "length")
    metrics.ended(10.0, 13.0, 13.0, 100, 1, "error")  # a single token has no time per further token
    metrics.ended(10.0, None, None, 5, 0, "cancelled")
    found = {name.removeprefix("mycli:"): value for name, value in values(metrics).items()}
    assert found["e2e_request_latency_seconds_sum"] == 4 + 4 + 3 and found["prompt_tokens_total"] == 116
    assert found["request_decode_time_seconds_sum"] == 3 + 2 + 0
    assert found["request_time_per_output_token_seconds_sum"] == 3 / 3 + 2 / 1
    assert found["request_time_per_output_token_seconds_count"] == 2
    assert found["request_prompt_tokens_sum"] == 116 and found["request_generation_tokens_sum"] == 7
    assert found["corrupted_requests_total"] == found['request_success_total{finished_reason="error"}'] == 1
    assert found['request_prompt_tokens_bucket{le="8.0"}'] == 1
    sizes = [name for name in found if name.startswith("request_prompt_tokens_bucket")]
    bounds = [1, *(1 << power for power in range(3, 18, 2))]
    assert sizes == [f'request_prompt_tokens_bucket{{le="{bound}"}}' for bound in [*map(float, bounds), "+Inf"]]


def test_requests_are_counted_for_their_key() -> None:
    metrics = empty()
    metrics.used("ci", RequestFigures(prompt=20, completion=3, ttft=0.5))
    metrics.used("ci", RequestFigures(prompt=10, completion=0))  # ended before its first token
    metrics.used("", RequestFigures(prompt=7, completion=1, ttft=9.0))
    prefix, found = "mycli:key_", values(metrics)
    figures = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    assert figures['requests_total{key="ci"}'] == 2
    kinds = {"prompt": 30, "cached": 0, "completion": 3}
    assert {kind: figures[f'tokens_total{{key="ci",kind="{kind}"}}'] for kind in kinds} == kinds
    assert figures['time_to_first_token_seconds_sum{key="ci"}'] == 0.5
    assert figures['time_to_first_token_seconds_count{key="ci"}'] == 1
    assert not [name for name in figures if 'key=""' in name]
