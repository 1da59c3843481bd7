"""Asks an engine, and checks its answers, so that an engine that did not do the work gets no figures."""

import hashlib
import json
from collections.abc import Sequence

from harness.api import Engine, EventSink, GenerationRequest, GenerationResult, HarnessError, RequestTrace, Score
from harness.api.task import Pair

#: Pairs per call of an engine's `score`.
_PAIRS_PER_CALL = 1024


def generate(engine: Engine, requests: Sequence[GenerationRequest], on_event: EventSink) -> list[GenerationResult]:
    """The engine's results, in the order in which they finish."""
    results, done, total = [], 0, sum(r.sampling.max_tokens for r in requests)
    on_event("generate", 0, total)
    for result in engine.generate(requests):
        results.append(result)
        done += len(result.tokens)
        on_event("generate", done, total)
    return results


def score(engine: Engine, pairs: Sequence[Pair], on_event: EventSink) -> list[Score]:
    """The engine's scores, in the order of `pairs`.

    It gets the pairs in groups, large enough to pack well and small enough to show progress; longest first, so that an
    engine that pads gets pairs of similar length together.
    """
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]) - len(pairs[i][1]), pairs[i]))
    by_index: dict[int, Score] = {}
    for start in range(0, len(order), _PAIRS_PER_CALL):
        on_event("score", start, len(pairs))
        piece = order[start : start + _PAIRS_PER_CALL]
        by_index |= zip(piece, engine.score([pairs[i] for i in piece]), strict=True)
    return [by_index[i] for i in range(len(pairs))]


def check(
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    vocab: int,
    elapsed_s: float | None = None,
) -> list[RequestTrace]:
    """Checks that every request was answered once, in full and with plausible times; returns the requests' traces.

    `elapsed_s` is the duration by the worker's clock, None for simulated times. Figures are computed from the engine's
    times, so these must agree with it. Raises HarnessError naming the first request that was lost, repeated, cut
    short, run with another prompt length, or that has impossible token ids or times.
    """
    answered = {r.id: r for r in results}
    if len(answered) != len(results):
        raise HarnessError("check failed: a request was answered twice")
    if unknown := sorted(answered.keys() - {r.id for r in requests}):
        raise HarnessError(f"check failed: {unknown[0]} was never asked for")
    end = max((t for r in results for t in r.token_times_s), default=0.0)
    if elapsed_s is not None and not 0.9 * elapsed_s - 1.0 <= end <= elapsed_s + 0.01:
        raise HarnessError(f"check failed: token times end at {end:.2f} s, but the work took {elapsed_s:.2f} s")
    traces = []
    for request in requests:
        if request.id not in answered:
            raise HarnessError(f"check failed: request {request.id} was not answered")
        result = answered[request.id]
        prompt, generated, times = result.prompt_tokens, len(result.tokens), result.token_times_s
        expected = request.sampling.max_tokens
        problems = {
            f"{generated} tokens instead of {expected}": request.sampling.ignore_eos and generated != expected,
            f"{generated} tokens, more than {expected}": generated > expected,
            f"attended to {prompt} prompt tokens instead of {len(request.prompt)}": prompt != len(request.prompt),
            "token ids outside the vocabulary": any(not 0 <= t < vocab for t in result.tokens),
            f"{len(times)} times for {generated} tokens": len(times) != generated,
            "times that run backwards": [result.start_s, *times] != sorted([result.start_s, *times]),
            "no token": not result.tokens,
            "negative padding": result.padding_tokens < 0,
        }
        for problem, occurs in problems.items():
            if occurs:
                raise HarnessError(f"check failed: request {request.id}: {problem}")
        traces.append(
            RequestTrace(
                request.id,
                prompt,
                generated,
                result.padding_tokens,
                round(result.start_s, 6),
                tuple(round(t, 6) for t in times),
                result.finish_reason,
                hashlib.sha256(json.dumps([request.prompt, result.tokens]).encode()).hexdigest()[:12],
            )
        )
    return traces
