"""The sequences that passes work on: one generates a request's tokens, one is scored."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from engines.common import sampling
from engines.offload.scheduler import ActiveSequence
from harness.api import GenerationRequest, GenerationResult, Score

#: Rows of logits that are scored at a time, so that they stay in the CPU's caches.
_ROWS = 16
_NO_IDS = torch.zeros(1, 0, dtype=torch.long)


class Generation(ActiveSequence):
    """One request: decoded greedily or sampled, until its length, an end-of-sequence token or a stop string."""

    def __init__(
        self, request: GenerationRequest, eos: Sequence[int], decode: Callable[[Sequence[int]], str] | None
    ) -> None:
        super().__init__(request.prompt, request.sampling.max_tokens, request.arrival_s)
        self.request = request
        self._eos = eos
        self._decode = decode
        self._sampler = sampling.RowSampler([request.sampling], eos)
        self._reason: Literal["length", "stop"] | None = None

    def consume(self, logits: torch.Tensor, now_s: float) -> bool:
        """Takes the logits [logits positions, vocab] of a pass that ended at `now_s`; returns whether it is done."""
        if not len(logits):
            return False
        scores = self._sampler(_NO_IDS, logits.float())  # none of its settings looks at earlier tokens
        self.tokens.append(int(scores[0].argmax()))
        self.times.append(now_s)
        generated = self.tokens[len(self.request.prompt) :]
        self._reason = sampling.finish_reason(self.request.sampling, generated, self._eos, self._decode)
        return self._reason is not None

    def result(self) -> GenerationResult:
        """The finished request."""
        return GenerationResult(
            id=self.request.id,
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            start_s=self.start_s,
            token_times_s=tuple(self.times),
            prompt_tokens=len(self.request.prompt),
            finish_reason=self._reason or "length",
            logprobs=tuple(self._sampler.logprobs[0]),
        )


class Scoring(ActiveSequence):
    """One continuation and its log-likelihood: only the positions that predict it need logits."""

    def __init__(self, index: int, full: Sequence[int], continuation: int) -> None:
        super().__init__(full[:-1], 1)  # the last token is only predicted
        self.index = index
        self._full = full
        self._first = len(full) - 1 - continuation
        self._position = self._first
        self._logprob = 0.0
        self._greedy = True

    @property
    def cacheable_tokens(self) -> int:
        return max(0, min(self._first, len(self.tokens) - 2))

    def reset(self) -> None:
        super().reset()
        self._position = self._first
        self._logprob, self._greedy = 0.0, True

    def logits_positions(self, count: int) -> range:
        return range(max(self._first, self.cached), max(self._first, self.cached + count))

    def consume(self, logits: torch.Tensor, now_s: float) -> bool:
        """Takes the logits [logits positions, vocab] of a pass; returns whether it was the last."""
        for rows in torch.split(logits, _ROWS):
            target = torch.tensor(self._full[self._position + 1 : self._position + 1 + len(rows)])
            log_probs = torch.log_softmax(rows.float(), dim=-1)
            self._logprob += log_probs.gather(1, target[:, None]).double().sum().item()
            self._greedy &= bool((rows.argmax(dim=-1) == target).all())
            self._position += len(rows)
        return self.cached == len(self.tokens)

    def result(self) -> Score:
        """The finished score."""
        return Score(self._logprob, self._greedy)
