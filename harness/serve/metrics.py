"""What a server counts, for Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.api import GenerationResult, KVStoreStats, OnlineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class _EngineCollector(Collector):
    """The engine's own counts, read when they are asked for."""

    def __init__(self, stats: Callable[[], OnlineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("harness_requests_waiting", "Requests that are queued.", stats.waiting)
        yield GaugeMetricFamily("harness_requests_running", "Requests that share passes.", stats.running)
        for state, blocks in (("used", stats.kv_blocks_used), ("total", stats.kv_blocks_total)):
            family = GaugeMetricFamily(f"harness_kv_blocks_{state}", f"KV blocks {state}.", labels=("tier",))
            for tier, count in blocks.items():
                family.add_metric((tier,), count)
            yield family
        yield CounterMetricFamily(
            "harness_prefix_hit_tokens", "Prompt tokens found in a cache.", stats.prefix_hit_tokens
        )
        yield CounterMetricFamily("harness_preemptions", "Requests that lost their KV blocks.", stats.preemptions)
        yield CounterMetricFamily("harness_passes", "Passes over the model.", stats.passes)
        yield CounterMetricFamily("harness_pass_rows", "Tokens of all passes.", stats.rows)
        yield CounterMetricFamily("harness_pass_seconds", "Seconds of all passes.", stats.pass_s)
        between = "Seconds between passes in which nothing computed."
        yield CounterMetricFamily("harness_between_passes_seconds", between, stats.between_passes_s)
        tasks = CounterMetricFamily("harness_task_seconds", "Seconds of passes by what was at work.", labels=("task",))
        for task, seconds in stats.task_s.items():
            tasks.add_metric((task,), seconds)
        yield tasks
        if stats.kv_store is not None:
            yield from _of_store(stats.kv_store)


def _of_store(store: KVStoreStats) -> Iterable[Metric]:
    """What a store of past requests' KV blocks holds and did, by tier."""
    stored = GaugeMetricFamily("harness_kv_store_blocks", "Blocks kept for later requests.", labels=("tier",))
    for tier, count in store.blocks.items():
        stored.add_metric((tier,), count)
    yield stored
    counts = (
        ("hit_tokens", "Tokens whose keys and values were read instead of computed.", store.hit_tokens),
        ("read_bytes", "Bytes read.", store.bytes_read),
        ("written_bytes", "Bytes written.", store.bytes_written),
        ("evictions", "Blocks dropped.", store.evictions),
    )
    for name, what, by_tier in counts:
        family = CounterMetricFamily(f"harness_kv_store_{name}", what, labels=("tier",))
        for tier, count in by_tier.items():
            family.add_metric((tier,), count)
        yield family
    recomputed = "Stored tokens that were faster to compute than to read."
    yield CounterMetricFamily("harness_kv_store_recomputed_tokens", recomputed, store.recomputed_tokens)
    failed = "1 once a write failed: nothing more is stored on disk."
    yield GaugeMetricFamily("harness_kv_store_failed", failed, float(bool(store.problem)))


class Metrics:
    """A server's registry. Latencies count from when a request was let in."""

    def __init__(self, stats: Callable[[], OnlineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._requests = Counter(
            "harness_requests", "Requests by how they ended.", ["outcome"], registry=self._registry
        )
        self._tokens = Counter("harness_tokens", "Tokens of answered requests.", ["kind"], registry=self._registry)
        self._ttft = Histogram(
            "harness_ttft_seconds", "Time to the first token.", buckets=_SECONDS, registry=self._registry
        )
        self._tpot = Histogram(
            "harness_tpot_seconds", "Time per token after the first.", buckets=_SECONDS, registry=self._registry
        )

    def ended(self, outcome: str) -> None:
        """Counts an HTTP request: `ok`, `refused`, `cancelled`, `busy` or `failed`."""
        self._requests.labels(outcome).inc()

    def answered(self, result: GenerationResult, let_in_s: float) -> None:
        """Counts an answer's tokens and times; `let_in_s` is on the engine's clock."""
        self._tokens.labels("prompt").inc(result.prompt_tokens)
        self._tokens.labels("generated").inc(len(result.tokens))
        if times := result.token_times_s:
            self._ttft.observe(max(0.0, times[0] - let_in_s))
            if len(times) > 1:
                self._tpot.observe((times[-1] - times[0]) / (len(times) - 1))

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)
