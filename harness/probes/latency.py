"""Throughput and latency of one run, computed from the time of every token."""

from collections.abc import Sequence

from harness.api import RequestTrace
from harness.common.intervals import union_length
from harness.common.percentile import percentile


def metrics(traces: Sequence[RequestTrace], phased: bool) -> dict[str, float | None]:
    """Figures in real, non-pad tokens and seconds; definitions as in docs/reference/records.md.

    Time runs from the first request's start to the last token. Prefill time is the time during which at least one
    request was between its start and its first token; decode time is the rest. The decode figures are None if the
    engine mixes the two (`phased` is false) or nothing was decoded.
    """
    begin = min(t.start_s for t in traces)
    end = max(t.token_times_s[-1] for t in traces)
    total = end - begin
    generated = sum(t.generated_tokens for t in traces)
    prompt = sum(t.prompt_tokens for t in traces)
    padding = sum(t.padding_tokens for t in traces)
    prefill = union_length([(t.start_s, t.token_times_s[0]) for t in traces])
    decode = total - prefill
    decoded = generated - len(traces)
    split = phased and decoded > 0 and decode > 0
    ttft = [t.token_times_s[0] - t.start_s for t in traces]
    tpot = [(t.token_times_s[-1] - t.token_times_s[0]) / (n - 1) for t in traces if (n := t.generated_tokens) > 1]
    return {
        "generation_throughput_tok_s": _rate(generated, total),
        "decode_throughput_tok_s": decoded / decode if split else None,
        "total_throughput_tok_s": _rate(prompt + generated, total),
        "padded_throughput_tok_s": _rate(prompt + generated + padding, total),
        "total_s": total,
        "prefill_s": prefill if phased else None,
        "decode_s": decode if split else None,
        "num_requests": float(len(traces)),
        "prompt_tokens": float(prompt),
        "generated_tokens": float(generated),
        "padding_tokens": float(padding),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "tpot_p50_s": percentile(tpot, 50),
        "tpot_p99_s": percentile(tpot, 99),
    }


def scored_metrics(pairs: int, tokens: int, seconds: float, padding: float) -> dict[str, float | None]:
    """Figures of scoring `pairs` of context and continuation in `seconds`.

    `tokens` counts contexts and continuations; `padding` counts the pad tokens computed in addition.
    """
    return {
        "score_s": seconds,
        "scored_pairs": float(pairs),
        "scored_tokens": float(tokens),
        "score_throughput_tok_s": _rate(tokens, seconds),
        "total_throughput_tok_s": _rate(tokens, seconds),
        "padded_throughput_tok_s": _rate(tokens + padding, seconds),
    }


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
