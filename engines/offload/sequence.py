"""The sequences that passes work on, and the one that generates a request's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from engines.common import sampling
from harness.api import GenerationRequest, GenerationResult


class ActiveSequence(Protocol):
    """Known tokens, the first `cached` of which have keys and values in the KV blocks of `block_table`."""

    tokens: list[int]
    cached: int
    block_table: list[int]
    arrival_s: float
    start_s: float

    @property
    def steps_left(self) -> int:
        """How many passes it still needs at most, counted from the one that computes its last known token."""
        ...

    @property
    def cacheable_tokens(self) -> int:
        """How many of its first tokens may be taken from another sequence's cached blocks."""
        ...

    def reset(self) -> None:
        """After preemption: all known tokens, generated ones too, will be computed again."""
        ...

    def logits_positions(self, count: int) -> range:
        """The positions among the next `count` tokens that need logits."""
        ...

    def consume(self, logits: torch.Tensor, now_s: float) -> bool:
        """Takes the logits [logits positions, vocab] of a pass that ended at `now_s`; returns whether it is done."""
        ...


_NO_IDS = torch.zeros(1, 0, dtype=torch.long)


class Generation:
    """One request: decoded greedily or sampled, until its length, an end-of-sequence token or a stop string."""

    def __init__(
        self, request: GenerationRequest, eos: Sequence[int], decode: Callable[[Sequence[int]], str] | None
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.cached = 0
        self.block_table: list[int] = []
        self.arrival_s = request.arrival_s
        self.start_s = -1.0
        self._eos = eos
        self._decode = decode
        self._sampler = sampling.RowSampler([request.sampling], eos)
        self._times: list[float] = []
        self._reason: Literal["length", "stop"] | None = None

    @property
    def steps_left(self) -> int:
        return self.request.sampling.max_tokens - len(self._times)

    @property
    def cacheable_tokens(self) -> int:
        return max(
            0, len(self.tokens) - 2
        )  # the last token gives the next, and no row is computed alone: see `prompt_rows`

    def reset(self) -> None:
        self.cached = 0

    def logits_positions(self, count: int) -> range:
        """The last known token's position, if the pass reaches it: its logits give the next token."""
        end = self.cached + count
        return range(end - 1, end) if end == len(self.tokens) else range(0)

    def consume(self, logits: torch.Tensor, now_s: float) -> bool:
        if not len(logits):
            return False
        scores = self._sampler(_NO_IDS, logits.float())  # none of its settings looks at earlier tokens
        self.tokens.append(int(scores[0].argmax()))
        self._times.append(now_s)
        generated = self.tokens[len(self.request.prompt) :]
        self._reason = sampling.finish_reason(self.request.sampling, generated, self._eos, self._decode)
        return self._reason is not None

    def result(self) -> GenerationResult:
        """The finished request."""
        return GenerationResult(
            id=self.request.id,
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            start_s=self.start_s,
            token_times_s=tuple(self._times),
            prompt_tokens=len(self.request.prompt),
            finish_reason=self._reason or "length",
            logprobs=tuple(self._sampler.logprobs[0]),
        )
