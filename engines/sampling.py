"""Per-request decoding inside one batch of transformers' `generate`: every row has its own settings and seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness.api import HarnessError, SamplingParams


def validate(sampling: SamplingParams, request: str) -> None:
    """Raises HarnessError naming `request` and the first setting that is out of range."""
    for name, holds, rule in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
    ):
        if not holds:
            raise HarnessError(f"request {request}: {name} is {getattr(sampling, name)}; it must be {rule}")


class RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Turns greedy choice into sampling, row by row: argmax(scores + Gumbel noise) is a draw from softmax(scores).

    So requests with different settings share a batch, and a seed gives the same tokens in any batch. Rows of
    temperature 0 stay greedy; rows that ignore the end of sequence can never produce it.
    """

    def __init__(self, rows: Sequence[SamplingParams], eos: Sequence[int]) -> None:
        self._silenced = torch.tensor([i for i, s in enumerate(rows) if s.ignore_eos], dtype=torch.long)
        self._eos = torch.tensor(list(eos), dtype=torch.long)
        self._sampled = {i: (_warpers(s), _generator(s.seed)) for i, s in enumerate(rows) if s.temperature > 0}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocab] float32 in, scores whose argmax is the chosen token out."""
        scores[self._silenced[:, None], self._eos] = -torch.inf
        for row, (warpers, generator) in self._sampled.items():
            warped = warpers(input_ids[row : row + 1], scores[row : row + 1])
            noise = torch.empty_like(warped).exponential_(generator=generator)
            scores[row] = (warped - noise.clamp_min(torch.finfo(noise.dtype).tiny).log())[0]
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
    if generated[-1] in eos and not sampling.ignore_eos:
        return "stop"
    if sampling.stop and decode is not None:
        text = decode(generated)
        if any(stop in text for stop in sampling.stop):
            return "stop"
    return "length" if len(generated) >= sampling.max_tokens else None


def _warpers(sampling: SamplingParams) -> Any:
    """In the order vLLM and transformers apply them: temperature, top-k, top-p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
