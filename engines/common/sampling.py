"""Per-request decoding inside one batch of transformers' `generate`: every row has its own settings and seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness.api import SamplingParams, TokenLogprob

#: The lowest temperature that float32 scores can be divided by; the likeliest token is certain long before.
_COLDEST = 1e-6


class RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Turns greedy choice into sampling, row by row: argmax(scores + Gumbel noise) is a draw from softmax(scores).

    So requests with different settings share a batch, and a seed gives the same tokens in any batch. Rows of
    temperature 0 stay greedy; rows that ignore the end of sequence, or must not end yet, cannot produce it.
    `logprobs`: by row, of every token chosen so far, where asked for.
    """

    def __init__(self, rows: Sequence[SamplingParams], eos: Sequence[int]) -> None:
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in rows]
        self._steps = 0
        self._endless_for = torch.tensor([math.inf if s.ignore_eos else s.min_tokens for s in rows])
        self._eos = torch.tensor(list(eos), dtype=torch.long)
        self._sampled = {
            i: (_warpers(s), np.random.default_rng(s.seed)) for i, s in enumerate(rows) if s.temperature > 0
        }
        self._reported = {i: s.logprobs for i, s in enumerate(rows) if s.logprobs is not None}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocab] float32 in, scores whose argmax is the chosen token out."""
        log_probs = {row: torch.log_softmax(scores[row], dim=-1) for row in self._reported}
        silenced = torch.where(self._endless_for > self._steps)[0]
        scores[silenced[:, None], self._eos] = -torch.inf
        for row, (warpers, generator) in self._sampled.items():
            warped = warpers(input_ids[row : row + 1], scores[row : row + 1])
            noise = torch.from_numpy(generator.standard_exponential(warped.shape, dtype=np.float32))
            scores[row] = (warped - noise.clamp_min(torch.finfo(noise.dtype).tiny).log())[0]
        for row, values in log_probs.items():
            self.logprobs[row].append(_reported(values, int(scores[row].argmax()), self._reported[row]))
        self._steps += 1
        return scores


class RowClock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every step and where each row ends: its own max_tokens, end of sequence or stop string."""

    def __init__(
        self,
        rows: Sequence[SamplingParams],
        prompt_len: int,
        eos: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.times: list[float] = []
        self.lengths = [0] * len(rows)
        self.reasons: list[Literal["length", "stop"] | None] = [None] * len(rows)
        self._rows = rows
        self._prompt_len = prompt_len
        self._eos = frozenset(eos)
        self._decode = decode

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Token ids [rows, length] in, a boolean [rows] of the rows that are done out."""
        self.times.append(time.perf_counter())
        for row, tokens in enumerate(input_ids[:, self._prompt_len :].tolist()):
            if self.reasons[row] is None:
                self.lengths[row] = len(tokens)
                self.reasons[row] = finish_reason(self._rows[row], tokens, self._eos, self._decode)
        return torch.tensor([reason is not None for reason in self.reasons], device=input_ids.device)


def finish_reason(
    sampling: SamplingParams,
    generated: Sequence[int],
    eos: Collection[int],
    decode: Callable[[Sequence[int]], str] | None,
) -> Literal["length", "stop"] | None:
    """Why generation ends with the last of the `generated` tokens, or None where it goes on.

    `decode` is needed for stop strings only.
    """
    if len(generated) < sampling.min_tokens:
        return None
    if generated[-1] in eos and not sampling.ignore_eos:
        return "stop"
    if sampling.stop and decode is not None:
        too_early = len(decode(generated[: sampling.min_tokens - 1])) if sampling.min_tokens > 1 else 0
        if sampling.stop_at(decode(generated), too_early) is not None:
            return "stop"
    return "length" if len(generated) >= sampling.max_tokens else None


def _reported(log_probs: torch.Tensor, chosen: int, alternatives: int) -> TokenLogprob:
    values, ids = log_probs.topk(min(alternatives, len(log_probs)))
    return TokenLogprob(log_probs[chosen].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _warpers(sampling: SamplingParams) -> Any:
    """In the order vLLM and transformers apply them: temperature, top-k, top-p, min-p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(max(_COLDEST, sampling.temperature)))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
