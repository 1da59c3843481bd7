"""Checks an engine's answers: whoever did not do the work gets no figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from harness.api import GenerationRequest, GenerationResult, HarnessError, RequestTrace


def check(requests: Sequence[GenerationRequest], results: Sequence[GenerationResult], vocab: int) -> list[RequestTrace]:
    """Refuses a run that did not do the work: every engine answers every request once, with the tokens asked for.

    Raises HarnessError naming the first request that was lost, repeated, cut short, ran on another prompt length,
    computed padding without saying so, or has impossible ids or times.
    """
    answered = {r.id: r for r in results}
    if len(answered) != len(results):
        raise HarnessError("check failed: a request was answered twice")
    if unknown := sorted(answered.keys() - {r.id for r in requests}):
        raise HarnessError(f"check failed: {unknown[0]} was never asked for")
    traces = []
    for request in requests:
        if request.id not in answered:
            raise HarnessError(f"check failed: request {request.id} was not answered")
        result = answered[request.id]
        wanted = request.sampling.max_tokens
        problems = {
            f"{len(result.tokens)} tokens instead of {wanted}": request.sampling.ignore_eos
            and len(result.tokens) != wanted,
            f"{len(result.tokens)} tokens, more than {wanted}": len(result.tokens) > wanted,
            f"attended to {result.prompt_tokens} prompt tokens instead of {len(request.prompt)}": result.prompt_tokens
            != len(request.prompt),
            "token ids outside the vocabulary": any(not 0 <= t < vocab for t in result.tokens),
            f"{len(result.token_times_s)} times for {len(result.tokens)} tokens": len(result.token_times_s)
            != len(result.tokens),
            "times that run backwards": list(result.token_times_s) != sorted(result.token_times_s)
            or bool(result.token_times_s and result.token_times_s[0] < result.start_s),
            "no token": not result.tokens,
            "negative padding": result.padding_tokens < 0,
        }
        for problem, found in problems.items():
            if found:
                raise HarnessError(f"check failed: request {request.id}: {problem}")
        traces.append(
            RequestTrace(
                request.id,
                result.prompt_tokens,
                len(result.tokens),
                result.padding_tokens,
                round(result.start_s, 6),
                tuple(round(t, 6) for t in result.token_times_s),
                result.finish_reason,
                hashlib.sha256(json.dumps([request.prompt, result.tokens]).encode()).hexdigest()[:12],
            )
        )
    return traces
