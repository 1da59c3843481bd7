"""Online workloads: when requests and conversations arrive, and what each turn asks for."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.api import Conversation, HarnessError, Turn, WorkloadSpec
from suites.lengths import Lengths, lengths_of
from suites.trace_file import TraceLine, arrival_times, read_trace
from suites.workloads import random_tokens


@dataclass(frozen=True)
class Online:
    """The workload of kind `arrivals` or `conversation` that `spec` describes. Building it raises HarnessError for
    lengths or a trace that cannot be used."""

    spec: WorkloadSpec

    def __post_init__(self) -> None:
        _ = self._lengths
        if self.spec.process == "trace" and not self._times[-1] and self.spec.rate is not None:
            raise HarnessError(f"trace {self.spec.trace} has all requests at one time: they cannot be spread to a rate")

    def conversations(self, vocab: int, seed: int, rate: float | None = None) -> Iterator[Conversation]:
        """Conversations in the order of arrival, without end unless a trace sets the times."""
        rounds = self.spec.rounds if self.spec.kind == "conversation" else 1
        for i, arrival_s in enumerate(self._arrivals(seed, rate)):
            turns = tuple(self._turn(i * rounds + k, k, vocab, seed, rate) for k in range(rounds))
            yield Conversation(f"c{i:05d}", arrival_s, turns)

    @cached_property
    def _trace(self) -> tuple[TraceLine, ...]:
        return tuple(read_trace(self.spec.trace)) if self.spec.trace else ()

    @cached_property
    def _times(self) -> list[float]:
        return arrival_times(list(self._trace))

    @cached_property
    def _lengths(self) -> Lengths:
        spec = self.spec
        return lengths_of(spec.lengths, spec.prompt_len, spec.gen_len, self._trace)

    def _arrivals(self, seed: int, rate: float | None) -> Iterator[float]:
        """Seconds of each arrival. Intervals of a seed are the same at every rate, stretched."""
        rate = rate or (self.spec.rate if isinstance(self.spec.rate, float | int) else None)
        if self.spec.process == "trace":
            # the trace's mean rate: its intervals over its duration
            stretch = 1.0 if rate is None else (len(self._times) - 1) / self._times[-1] / rate
            return (stretch * time for time in self._times)
        return itertools.accumulate(self._interval(seed, i) / (rate or 1.0) for i in itertools.count())

    def _interval(self, seed: int, index: int) -> float:
        """The interval before arrival `index`, of mean 1."""
        rng = random.Random(f"{seed}/arrival/{index}")
        match self.spec.process:
            case "poisson":
                return rng.expovariate(1.0)
            case "gamma":  # shape k, scale 1/k: mean 1, variance 1/k
                shape = self.spec.cv**-2
                return rng.gammavariate(shape, 1 / shape)
            case _:
                return 1.0

    def _turn(self, index: int, round_: int, vocab: int, seed: int, rate: float | None) -> Turn:
        prompt_len, output_len = self._lengths.of(index, seed)
        think_s = 0.0
        if round_ and self.spec.think_s:
            think_s = random.Random(f"{seed}/think/{index}").expovariate(1 / self.spec.think_s)
        tokens = random_tokens(prompt_len, vocab, seed if rate is None else f"{seed}@{rate!r}", index)
        return Turn(tokens, output_len, think_s)
