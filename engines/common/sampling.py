"""Samples each row of a batch by its own parameters and seed: for our engine and for `generate` of transformers."""

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

#: The lowest temperature that float32 scores are divided by; sampling is greedy well above it.
_MIN_TEMPERATURE = 1e-6
#: Characters at the begin of a decoded end of a text that may differ from those in the whole text.
_CONTEXT = 8
#: Of one row: none of the settings of `RowSampler.token` looks at earlier tokens.
_NO_IDS = torch.zeros(1, 0, dtype=torch.long)


class RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Samples under greedy decoding, row by row: argmax(scores + Gumbel noise) is a draw from softmax(scores).

    Requests with different sampling parameters can therefore share a batch, and a seed gives the same tokens in any
    batch. Rows of temperature 0 stay greedy. A row with `ignore_eos`, or with fewer than `min_tokens` tokens, cannot
    select the end-of-sequence token. `logprobs[row]` has an entry for each token so far, where the row requests them.
    """

    def __init__(self, rows: Sequence[SamplingParams], eos: Sequence[int]) -> None:
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in rows]
        self._steps = 0
        self._eos_banned_until = torch.tensor([math.inf if s.ignore_eos else s.min_tokens for s in rows])
        self._eos = torch.tensor(list(eos), dtype=torch.long)
        self._ends = frozenset(eos)
        self._sampled = {
            i: (_warpers(s), np.random.default_rng(s.seed)) for i, s in enumerate(rows) if s.temperature > 0
        }
        self._num_logprobs = {i: s.logprobs for i, s in enumerate(rows) if s.logprobs is not None}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `select`; transformers refuses processors that take more than this, and calls once a step."""
        self._steps += 1
        return self.select(input_ids, scores, self._steps - 1)

    def select(
        self, input_ids: torch.Tensor, scores: torch.Tensor, generated: int, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Takes float32 scores [rows, vocab] after so many `generated` tokens and returns scores whose argmax is the
        selected token, one of those that are `allowed` [rows, vocab]."""
        log_probs = {row: torch.log_softmax(scores[row], dim=-1) for row in self._num_logprobs}
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        banned = torch.where(self._eos_banned_until > generated)[0]
        scores[banned[:, None], self._eos] = -torch.inf
        for row, (warpers, generator) in self._sampled.items():
            warped = warpers(input_ids[row : row + 1], scores[row : row + 1])
            noise = torch.from_numpy(generator.standard_exponential(warped.shape, dtype=np.float32))
            scores[row] = (warped - noise.clamp_min(torch.finfo(noise.dtype).tiny).log())[0]
        for row, values in log_probs.items():
            self.logprobs[row].append(token_logprob(values, int(scores[row].argmax()), self._num_logprobs[row]))
        return scores

    def token(self, logits: torch.Tensor, generated: int, allowed: torch.Tensor | None = None) -> int:
        """The token of the only row, as `select` has it, by logits [1, vocab] of any type."""
        scores = logits.float()
        if not self._sampled and not self._num_logprobs and allowed is None:
            # by numpy, which compares many values at a time where torch's argmax compares one after the other
            token = int(scores.numpy().argmax())
            if token not in self._ends:  # which it may not be allowed to be yet
                return token
        return int(self.select(_NO_IDS, scores, generated, allowed)[0].argmax())


class RowClock(StoppingCriteria):  # type: ignore[misc]
    """Records the time of each step, and where each row ends: at max_tokens, an end of sequence or a stop string."""

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
        """Takes token ids [rows, length] and returns a boolean [rows]: which rows are finished."""
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
    """Why generation ends with the last `generated` token, or None while it goes on. Stop strings need `decode`."""
    if len(generated) < sampling.min_tokens:
        return None
    if generated[-1] in eos and not sampling.ignore_eos:
        return "stop"
    if sampling.stop and decode is not None and _ends_with_any(sampling.stop, generated, decode):
        too_early = len(decode(generated[: sampling.min_tokens - 1])) if sampling.min_tokens > 1 else 0
        if sampling.stop_at(decode(generated), too_early) is not None:
            return "stop"
    return "length" if len(generated) >= sampling.max_tokens else None


def _ends_with_any(stops: Sequence[str], generated: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether one of the stop strings may have come with the last token. Of a long text only its end is decoded, so a
    late token takes as long as an early one; what is written for the first tokens of that may depend on those before.
    """
    characters = max(map(len, stops)) + _CONTEXT
    count, last = characters + 1, len(decode(generated[-1:]))
    while count < len(generated):
        end = decode(generated[-count:])
        if len(end) - last >= characters:
            return any(stop in end for stop in stops)
        count *= 2  # parts of characters, and special tokens that are not shown
    return True


def token_logprob(log_probs: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Of a token among log-probabilities [vocab], with so many of the likeliest tokens."""
    values, ids = log_probs.topk(min(alternatives, len(log_probs)))
    return TokenLogprob(log_probs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _warpers(sampling: SamplingParams) -> Any:
    """In the order that vLLM and transformers apply them: temperature, top-k, top-p, min-p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(max(_MIN_TEMPERATURE, sampling.temperature)))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
