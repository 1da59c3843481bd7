"""The fake engine's passes: requests that take turns on a virtual clock, with tokens by a hash."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness import api

SHAPE = api.ModelShape(
    family="fake",
    num_layers=2,
    hidden=8,
    ffn=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    vocab=1000,
    max_context=4096,
    params_per_layer=4 * 8 * 8 + 2 * 8 * 32,
    params_total=2 * (4 * 8 * 8 + 2 * 8 * 32) + 1000 * 8,
)


@dataclass(eq=False)
class _Sequence:
    request: api.GenerationRequest
    start_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def result(self, cancelled: bool = False) -> api.GenerationResult:
        return api.GenerationResult(
            id=self.request.id,
            tokens=tuple(self.tokens),
            start_s=self.start_s,
            token_times_s=tuple(self.times),
            prompt_tokens=len(self.request.prompt),
            finish_reason="cancelled" if cancelled else "length",
            logprobs=tuple(self.logprob(len(self.request.prompt) + i) for i in range(len(self.tokens) * self.scored)),
            prompt_logprobs=tuple(
                self.logprob(i) for i in range(1, len(self.request.prompt)) if self.request.sampling.prompt_logprobs
            ),
        )

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.request.sampling.logprobs is not None

    def logprob(self, position: int) -> api.TokenLogprob:
        """Of the token at a position of prompt and answer, which is taken for the likeliest."""
        tokens = (*self.request.prompt, *self.tokens)
        value = fake_logprob(tokens[:position], position)
        return api.TokenLogprob(value, ((tokens[position], value),) * min(1, self.request.sampling.logprobs or 0))


class Passes:
    """At most `size` requests of at most `longest` tokens run; the next of the queue starts when one ends.

    A pass over n requests gives each a token and takes n / `rate_tok_s` virtual seconds.
    """

    def __init__(self, size: int, rate_tok_s: float, longest: int | None) -> None:
        self._size = size
        self._rate = rate_tok_s
        self._longest = longest
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._cancelled: dict[str, _Sequence] = {}
        self._tokens = self._passes = 0  # that were computed

    def submit(self, request: api.GenerationRequest) -> None:
        """Queues a request."""
        self._waiting.append(_Sequence(request, self.clock()))

    def cancel(self, request_id: str) -> None:
        """Ends a request with the next step, if it is pending."""
        for sequence in (*self._waiting, *self._running):
            if sequence.request.id == request_id:
                self._cancelled.setdefault(request_id, sequence)

    def step(self) -> list[api.Event]:
        """The events of one pass."""
        events: list[api.Event] = []
        for sequence in self._cancelled.values():
            (self._running if sequence in self._running else self._waiting).remove(sequence)
            events.append(api.FinishedEvent(sequence.result(cancelled=True)))
        self._cancelled.clear()
        while self._waiting and len(self._running) < self._size:
            sequence = self._waiting.popleft()
            if refusal := self._refusal(sequence.request):
                events.append(refusal)
                continue
            sequence.start_s = self.clock()
            self._running.append(sequence)
        self._passes += bool(self._running)
        self._tokens += len(self._running)
        for sequence in list(self._running):
            token = fake_token(sequence.request.sampling.seed or 0, sequence.request.prompt, len(sequence.tokens))
            sequence.tokens.append(token)
            sequence.times.append(self.clock())
            last = len(sequence.request.prompt) + len(sequence.tokens) - 1
            logprob = sequence.logprob(last) if sequence.scored else None
            events.append(api.TokenEvent(sequence.request.id, token, self.clock(), logprob))
            if len(sequence.tokens) == sequence.request.sampling.max_tokens:
                self._running.remove(sequence)
                events.append(api.FinishedEvent(sequence.result()))
        return events

    def pending(self) -> int:
        """Requests queued and running."""
        return len(self._waiting) + len(self._running)

    def clock(self) -> float:
        """Virtual seconds since the first pass began."""
        return self._tokens / self._rate

    def stats(self) -> api.OnlineStats:
        """Counts; there is no KV cache."""
        return api.OnlineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_blocks_used={},
            kv_blocks_total={},
            prefix_hit_tokens=0,
            preemptions=0,
            passes=self._passes,
            pass_s=self.clock(),
            rows=self._tokens,
            task_s={"products": self.clock()},
        )

    def _refusal(self, request: api.GenerationRequest) -> api.RefusedEvent | None:
        if any(s.request.id == request.id for s in self._running):
            return api.RefusedEvent(request.id, f"request {request.id}: another one with this id runs", "invalid")
        try:
            request.refuse_settings("fake", "json_schema")
            request.require_valid(SHAPE)
        except api.HarnessError as error:
            return api.RefusedEvent(request.id, str(error), "invalid")
        total = len(request.prompt) + request.sampling.max_tokens
        if self._longest is not None and total > self._longest:
            reason = f"request {request.id}: engine fake holds {self._longest} tokens of a sequence, not {total}"
            return api.RefusedEvent(request.id, reason, "infeasible")
        return None


def fake_hash(seed: int, tokens: Sequence[int], position: int) -> int:
    """64 bits that depend on all three."""
    text = f"{seed}:{position}:{','.join(map(str, tokens))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def fake_token(seed: int, prompt: Sequence[int], position: int) -> int:
    """The token that the fake model generates at a position."""
    return fake_hash(seed, prompt, position) % SHAPE.vocab


def fake_logprob(before: Sequence[int], position: int) -> float:
    """Between -8 and 0, of the token at `position`, with those `before` it."""
    return -(fake_hash(0, before, position) % 8000) / 1000
