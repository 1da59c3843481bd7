"""What a load generator sends and what it saw: conversations with their turns, and raw samples of a rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from harness.api.workload import Slo


@dataclass(frozen=True)
class Turn:
    """What a user adds: token ids, and the exact number of tokens to answer with. `think_s`: seconds between the
    previous answer's last token and this turn."""

    prompt: tuple[int, ...]
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """Turns of one user, each sent with all turns and answers before it. The first is due `arrival_s` seconds after the
    load begins; a closed loop ignores that."""

    id: str
    arrival_s: float
    turns: tuple[Turn, ...]


@runtime_checkable
class Arrivals(Protocol):
    """A source of conversations, in the order of their arrivals."""

    def conversations(self, vocab: int, seed: int, rate: float | None = None) -> Iterator[Conversation]:
        """Intervals and lengths depend on the seed alone; a rate stretches intervals. Ends only where a trace ends.

        `rate`: conversations a second, instead of the workload's own. Its prompts have token ids of their own, so that
        a prefix cache that saw another rate finds none of them.
        """


@dataclass(frozen=True)
class ServedRequest:
    """One request as its client saw it; all times in seconds since the load began.

    `due_s`: when it was to be sent; latencies count from there. `sent_s`: when the generator handed it over; the
    difference is the generator's lag. `start_s`: when work on it began, where the engine tells. `token_times_s`: when
    each token was there. `round`: which turn of its conversation. `asked_tokens`: how many were asked for; 0 where
    there is no answer. `cached_tokens`: of the prompt, those that a cache spared; None where the engine does not tell.
    """

    id: str
    due_s: float
    sent_s: float
    prompt_tokens: int
    token_times_s: tuple[float, ...] = ()
    start_s: float | None = None
    outcome: Literal["ok", "refused", "unfinished"] = "ok"
    reason: str = ""
    round: int = 0
    asked_tokens: int = 0
    digest: str = ""
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from due to the first token."""
        return self.token_times_s[0] - self.due_s

    @property
    def end_to_end_s(self) -> float:
        """Seconds from due to the last token."""
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for a single token."""
        tokens = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def normalized_s(self) -> float:
        """End-to-end seconds per output token (NanoFlow, section 6.3)."""
        return self.end_to_end_s / len(self.token_times_s)

    @property
    def queue_s(self) -> float | None:
        """Seconds from due until work on it began; None where the engine does not tell."""
        return None if self.start_s is None else max(0.0, self.start_s - self.due_s)

    def meets(self, slo: Slo) -> bool:
        """Whether it was answered within every limit."""
        if self.outcome != "ok" or not self.token_times_s:
            return False
        return all((value := getattr(self, name)) is None or value <= limit for name, limit in slo.limits.items())


@dataclass(frozen=True)
class ServedRate:
    """Raw samples of one rate, or of one closed loop (`rate` None).

    `rate`: offered requests (conversations) a second; None too for a trace's own times. `window_s`: for how long they
    arrived.
    """

    rate: float | None
    window_s: float
    requests: tuple[ServedRequest, ...]
