"""The sequence of which a continuation is scored: only the positions that predict it need logits."""

from collections.abc import Sequence

import torch

from engines.offload.scheduled_chunk import ActiveSequence
from harness.api import Score

#: Rows of logits that are scored at a time, so that they stay in the CPU's caches.
_ROWS = 16


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
        """Takes the logits [logits positions, vocab] of a pass in which it has advanced; returns whether it was the
        last."""
        for rows in torch.split(logits, _ROWS):
            target = torch.tensor(self._full[self._position + 1 : self._position + 1 + len(rows)])
            log_probs = torch.log_softmax(rows.float(), dim=-1)
            self._logprob += log_probs.gather(1, target[:, None]).double().sum().item()
            self._greedy &= bool((rows.argmax(dim=-1) == target).all())
            self._position += len(rows)
        return not self.steps_left

    def result(self) -> Score:
        """The finished score."""
        return Score(self._logprob, self._greedy)
