"""The sequence that generates a request's tokens."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from engines.common import sampling
from engines.common.json_schema import Constraint
from engines.offload.scheduled_chunk import ActiveSequence
from harness.api import GenerationRequest, GenerationResult, TokenLogprob

#: Rows of logits whose log-probabilities are computed at a time, so that they stay in the CPU's caches.
_ROWS = 16


class Generation(ActiveSequence):
    """One request: decoded greedily or sampled, until its length, an end-of-sequence token or a stop string."""

    def __init__(
        self,
        request: GenerationRequest,
        eos: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(request.prompt, request.sampling.max_tokens, request.arrival_s)
        self.request = request
        self._eos = eos
        self._decode = decode
        self._constraint = constraint
        self._sampler = sampling.RowSampler([request.sampling], eos)
        self._reason: Literal["length", "stop"] | None = None
        self._prompt_logprobs: list[TokenLogprob] = []  # of the prompt's second token, its third, and so on

    @property
    def cacheable_tokens(self) -> int:
        fewer = super().cacheable_tokens
        return min(fewer, len(self._prompt_logprobs)) if self._unscored else fewer

    def logits_positions(self, count: int) -> range:
        """Of a prompt whose log-probabilities are wanted, every position that predicts another of its tokens too."""
        if not self._unscored:
            return super().logits_positions(count)
        return range(max(self.cached, len(self._prompt_logprobs)), max(self.cached, self.cached + count))

    def consume(self, logits: torch.Tensor, now_s: float) -> bool:
        """Takes the logits [logits positions, vocab] of a pass that ended at `now_s`; returns whether it is done."""
        scored = min(len(logits), self._unscored)
        self._score_prompt(logits[:scored])
        if scored == len(logits):
            return False
        allowed = self._constraint.allowed()[None] if self._constraint else None
        self.tokens[-1] = self._sampler.token(logits[scored:], len(self.times) - 1, allowed)
        self.times[-1] = now_s
        generated = self.tokens[len(self.request.prompt) :]
        self._reason = sampling.finish_reason(self.request.sampling, generated, self._eos, self._decode)
        if self._constraint and self._reason is None:
            self._reason = self._constraint.accept(self.tokens[-1])
        return self._reason is not None

    @property
    def last_logprob(self) -> TokenLogprob | None:
        """Of the last generated token, if the request wants it."""
        logprobs = self._sampler.logprobs[0]
        return logprobs[-1] if logprobs else None

    def result(self, cancelled: bool = False) -> GenerationResult:
        """The finished request, or what there is of a cancelled one."""
        return GenerationResult(
            id=self.request.id,
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            start_s=self.start_s,
            token_times_s=tuple(self.times),
            prompt_tokens=len(self.request.prompt),
            finish_reason="cancelled" if cancelled else self._reason or "length",
            logprobs=tuple(self._sampler.logprobs[0]),
            cached_tokens=self.prefix_hit_tokens or 0,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    @property
    def _unscored(self) -> int:
        """How many of the prompt's tokens lack log-probabilities that are wanted."""
        wanted = len(self.request.prompt) - 1 if self.request.sampling.prompt_logprobs else 0
        return wanted - len(self._prompt_logprobs)

    def _score_prompt(self, logits: torch.Tensor) -> None:
        """Takes the rows [positions, vocab] that predict the prompt's next tokens."""
        alternatives = self.request.sampling.logprobs or 0
        for rows in torch.split(logits, _ROWS) if len(logits) else ():
            for log_probs in torch.log_softmax(rows.float(), dim=-1):
                token = self.request.prompt[len(self._prompt_logprobs) + 1]
                self._prompt_logprobs.append(sampling.token_logprob(log_probs, token, alternatives))
