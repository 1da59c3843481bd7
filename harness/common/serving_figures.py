"""Figures of requests that arrived over time: rates offered and completed, goodput, latencies against objectives."""

import itertools
import statistics
from collections.abc import Sequence

from harness.api import ServedRate, ServedRequest, Slo
from harness.common.percentile import percentile

#: A launch says so where its generator was later than this at the 99th percentile, in seconds.
LATE_S = 0.005
#: Latencies by the names that `Slo`, metrics and reports share.
LATENCIES = ("ttft_s", "tpot_s", "normalized_s", "end_to_end_s", "queue_s")


def answered(rate: ServedRate) -> list[ServedRequest]:
    """The requests that were answered."""
    return [request for request in rate.requests if request.outcome == "ok" and request.token_times_s]


def values(requests: Sequence[ServedRequest], latency: str) -> list[float]:
    """A latency of each answered request that has it."""
    found = (getattr(request, latency) for request in requests if request.outcome == "ok" and request.token_times_s)
    return [value for value in found if value is not None]


def gaps(requests: Sequence[ServedRequest]) -> list[float]:
    """Seconds between successive tokens, of all answered requests."""
    times = (request.token_times_s for request in requests if request.outcome == "ok")
    return [b - a for t in times for a, b in itertools.pairwise(t)]


def cached_tokens(requests: Sequence[ServedRequest]) -> float | None:
    """Tokens of answered prompts that a cache spared; None where the engine does not tell."""
    told = [r.cached_tokens for r in requests if r.outcome == "ok" and r.cached_tokens is not None]
    return float(sum(told)) if told else None


def elapsed_s(rate: ServedRate) -> float:
    """Seconds from the begin of the load until arrivals ended and the last token was there."""
    return max([rate.window_s, *(r.token_times_s[-1] for r in rate.requests if r.token_times_s)])


def attainment(rate: ServedRate, slo: Slo) -> float:
    """The share of all requests, refused ones included, that were answered within every objective."""
    return sum(request.meets(slo) for request in rate.requests) / len(rate.requests) if rate.requests else 0.0


def within(rate: ServedRate, slo: Slo) -> bool:
    """Whether a rate is within its objectives: by the share of requests, or by means over requests that were all
    answered."""
    if slo.attainment != "mean":
        return bool(rate.requests) and attainment(rate, slo) >= slo.attainment
    if not rate.requests or len(answered(rate)) < len(rate.requests):
        return False
    means = {name: statistics.fmean(values(rate.requests, name) or [0.0]) for name in slo.limits}
    return all(means[name] <= limit for name, limit in slo.limits.items())


def figures(rate: ServedRate, slo: Slo | None) -> dict[str, float | None]:
    """Metrics of one rate, as docs/reference/records.md defines them."""
    done, elapsed = answered(rate), elapsed_s(rate)
    tokens = sum(len(r.token_times_s) for r in rate.requests)
    lags = [r.sent_s - r.due_s for r in rate.requests]
    out: dict[str, float | None] = {
        "offered_req_s": len(rate.requests) / rate.window_s if rate.window_s else None,
        "completed_req_s": len(done) / elapsed if elapsed else None,
        "generation_throughput_tok_s": tokens / elapsed if elapsed else None,
        "total_s": elapsed,
        "num_requests": float(len(rate.requests)),
        "refused_requests": float(sum(r.outcome == "refused" for r in rate.requests)),
        "unfinished_requests": float(sum(r.outcome == "unfinished" for r in rate.requests)),
        "prompt_tokens": float(sum(r.prompt_tokens for r in rate.requests)),
        "cached_prompt_tokens": cached_tokens(rate.requests),
        "generated_tokens": float(tokens),
        "lag_p99_s": percentile(lags, 99),
    }
    for name in LATENCIES:
        out |= {f"{name.removesuffix('_s')}_p{q}_s": percentile(values(done, name), q) for q in (50, 99)}
    if slo is not None:
        out["goodput_req_s"] = sum(r.meets(slo) for r in done) / elapsed if elapsed else None
        out["slo_attainment"] = attainment(rate, slo)
    return out
