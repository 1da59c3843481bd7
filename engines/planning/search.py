"""Searches the best policy: schedules, bits, attention and batches are enumerated, fractions solved for each.

Source: FlexGen (Sheng et al. 2023), section 4.3. Bits and host attention are chosen by their modelled cost, as in
LM-Offload (Wu et al. 2024), section 3.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from harness.api import RESOURCE_WORDS, Bits, OffloadPolicy, Schedule

_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40)
#: The coarse grid takes every third of either; the search climbs from its best point.
_STRIDE = 3
#: Kinds within this share of the best estimate are predicted, and those with a higher estimate than what was predicted
#: before, but no more than _KINDS.
_CLOSE = 0.15
_KINDS = 3
#: Throughputs closer than this count as equal.
_ALIKE = 0.01
_SEARCHED_BITS: tuple[Bits, ...] = (16, 8, 4)
#: Bits of weights and cache, where the search chooses them.
ALL_BITS = tuple((weights, cache) for weights in _SEARCHED_BITS for cache in _SEARCHED_BITS)
_DEFAULT_POLICY = OffloadPolicy()


@dataclass(frozen=True)
class SearchSpace:
    """What the search may choose, and the constraints that it keeps.

    bits: of weights and cache.
    latency_s: limit on the time of a block, from its first token to its last.
    requests: of the whole job; no block is larger.
    base: the policy that all others are derived from.
    """

    schedules: Sequence[Schedule] = get_args(Schedule)
    bits: Sequence[tuple[Bits, Bits]] = ((16, 16),)
    cpu_attention: Sequence[bool] = (False, True)
    latency_s: float | None = None
    requests: int | None = None
    base: OffloadPolicy = _DEFAULT_POLICY

    def kinds(self) -> Iterator[OffloadPolicy]:
        """Each combination of schedule, bits and attention, as a policy for one sequence."""
        for schedule, (weight_bits, kv_bits), cpu_attention in itertools.product(
            self.schedules, self.bits, self.cpu_attention
        ):
            nano_batches = self.base.nano_batches
            if schedule == "sweep" and cpu_attention and len(self.cpu_attention) > 1 and nano_batches == 1:
                nano_batches = 2  # one is multiplied while the host attends for the other
            yield replace(
                self.base, gpu_batch_size=1, num_gpu_batches=1, schedule=schedule, weight_bits=weight_bits,
                kv_bits=kv_bits, cpu_attention=cpu_attention, nano_batches=nano_batches,
            )  # fmt: skip

    def allows(self, prediction: Prediction) -> bool:
        """Whether a prediction keeps the latency limit."""
        return self.latency_s is None or prediction.block_latency_s <= self.latency_s


@dataclass(frozen=True)
class Candidate:
    """A policy that can be run as it stands, and its prediction."""

    policy: OffloadPolicy
    prediction: Prediction


@dataclass(frozen=True)
class SearchResult:
    """The best policy, if any; and the best of every other kind with the reason why it lost."""

    best: Candidate | None
    rejected: Sequence[tuple[str, Candidate | None, str]]


#: Called with the number of kinds that are done, and of all.
Report = Callable[[int, int], None]


def no_report(done: int, total: int) -> None:
    """Reports nothing."""


def search(planner: ClosedFormPlanner, space: SearchSpace, report: Report = no_report) -> SearchResult:
    """The policy of the highest throughput under all constraints.

    Estimates rank the kinds; predictions decide among the few that may be the best.
    """
    tried: dict[str, Sequence[Candidate]] = {}
    kinds = list(space.kinds())
    for i, kind in enumerate(kinds):
        report(i, len(kinds) + _KINDS)
        tried[_name(kind, len(space.cpu_attention) > 1)] = _climb(planner, kind, space)
    best_by_kind = {name: _soonest(candidates) for name, candidates in tried.items()}
    estimates = {name: c.prediction.throughput_tok_s for name, c in best_by_kind.items() if c is not None}
    most = max(estimates.values(), default=0.0)
    close: list[str] = []
    reached = 0.0
    for i, name in enumerate(sorted(estimates, key=lambda name: -estimates[name])[:_KINDS]):
        if estimates[name] < min(reached, (1 - _CLOSE) * most):
            break
        report(len(kinds) + i, len(kinds) + _KINDS)
        close.append(name)
        if predicted := _predicted(planner, tried[name], space):
            reached = max(reached, predicted.prediction.throughput_tok_s)
        best_by_kind[name] = predicted
    # if all that was close misses the latency after all, take the best of the others by estimate
    best = _soonest(c for name in close if (c := best_by_kind[name])) or _soonest(c for c in best_by_kind.values() if c)
    if best is not None:
        best_by_kind = _comparable(best_by_kind, best, close, estimates)
    rejected = [
        (name, c, _reason(c, best, name in close)) for name, c in best_by_kind.items() if c is None or c is not best
    ]
    rejected.sort(key=lambda item: -item[1].prediction.throughput_tok_s if item[1] else 0.0)
    if best is not None and planner.divides_experts:
        best = _with_host_experts(planner, best, space)
    return SearchResult(best, rejected)


def _with_host_experts(planner: ClosedFormPlanner, best: Candidate, space: SearchSpace) -> Candidate:
    """The candidate with experts multiplied by the host too, if that is predicted to be faster, else as it is."""
    policy = planner.runnable(replace(best.policy, weights=space.base.weights, cpu_experts=True))
    if policy is None:
        return best
    beside = Candidate(policy, planner.predict(policy))
    faster = beside.prediction.throughput_tok_s > (1 + _ALIKE) * best.prediction.throughput_tok_s
    return beside if faster and space.allows(beside.prediction) else best


def _predicted(planner: ClosedFormPlanner, tried: Sequence[Candidate], space: SearchSpace) -> Candidate | None:
    """The best of a kind by prediction, of two: the fastest by estimate, and the soonest of those about as fast."""
    fastest = max(tried, key=lambda c: c.prediction.throughput_tok_s)
    policies = dict.fromkeys(c.policy for c in (_soonest(tried), fastest) if c)
    predicted = [Candidate(policy, planner.predict(policy)) for policy in policies]
    return _soonest(c for c in predicted if space.allows(c.prediction))


def _climb(planner: ClosedFormPlanner, kind: OffloadPolicy, space: SearchSpace) -> list[Candidate]:
    """All candidates met on the way uphill over batch size and number of batches, from the best of a coarse grid."""
    numbers = _NUM_BATCHES if kind.schedule == "zigzag" else (1,)
    sizes = planner.batch_sizes
    tried: dict[tuple[int, int], Candidate | None] = {}

    def score(at: tuple[int, int]) -> tuple[float, float]:
        if at not in tried:
            size, number = sizes[at[0]], numbers[at[1]]
            if space.requests is not None:
                size = min(size, -(-space.requests // number))
            tried[at] = _candidate(planner, replace(kind, gpu_batch_size=size, num_gpu_batches=number))
        return _merit(tried[at], space)

    grid = (range(0, len(sizes), _STRIDE), range(0, len(numbers), _STRIDE))
    at = max(itertools.product(*grid), key=score)
    while (better := max(_around(at, len(sizes), len(numbers)), key=score)) != at and score(better) > score(at):
        at = better
    return [candidate for candidate in tried.values() if candidate and space.allows(candidate.prediction)]


def _soonest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The lowest latency among those of the highest throughput, within _ALIKE."""
    some = list(candidates)
    most = max((c.prediction.throughput_tok_s for c in some), default=0.0)
    alike = [c for c in some if c.prediction.throughput_tok_s >= (1 - _ALIKE) * most]
    return min(alike, key=lambda c: c.prediction.block_latency_s, default=None)


def _around(at: tuple[int, int], rows: int, columns: int) -> Iterable[tuple[int, int]]:
    near = itertools.product(range(at[0] - 1, at[0] + 2), range(at[1] - 1, at[1] + 2))
    return [(i, j) for i, j in near if 0 <= i < rows and 0 <= j < columns]


def _candidate(planner: ClosedFormPlanner, policy: OffloadPolicy) -> Candidate | None:
    """The policy with its best fractions; None if none fit."""
    runnable = planner.runnable(policy)
    if runnable is None:
        return None
    return Candidate(runnable, planner.estimate(runnable))


def _merit(candidate: Candidate | None, space: SearchSpace) -> tuple[float, float]:
    """What the climb compares: throughput; below it, how near to the latency limit a candidate is that misses it."""
    if candidate is None:
        return 0.0, -math.inf
    prediction = candidate.prediction
    return prediction.throughput_tok_s if space.allows(prediction) else 0.0, -prediction.block_latency_s


def _name(kind: OffloadPolicy, with_attention: bool) -> str:
    """A kind in words."""
    exact = kind.weight_bits == kind.kv_bits == 16
    bits = "exact" if exact else f"weights {kind.weight_bits} bit, cache {kind.kv_bits} bit"
    where = f", attention on the {'host' if kind.cpu_attention else 'device'}" if with_attention else ""
    return f"{kind.schedule}, {bits}{where}"


def _comparable(
    candidates: Mapping[str, Candidate | None], best: Candidate, close: Sequence[str], estimates: Mapping[str, float]
) -> dict[str, Candidate | None]:
    """The candidates with estimates scaled by the ratio of the best's prediction to its estimate."""
    name_of_best = next(name for name, candidate in candidates.items() if candidate is best)
    scale = best.prediction.throughput_tok_s / estimates[name_of_best]
    comparable = dict(candidates)
    for name, candidate in candidates.items():
        if candidate is not None and candidate is not best and name not in close:
            rate = scale * candidate.prediction.throughput_tok_s
            comparable[name] = replace(candidate, prediction=replace(candidate.prediction, throughput_tok_s=rate))
    return comparable


def _reason(candidate: Candidate | None, best: Candidate | None, predicted: bool) -> str:
    if candidate is None:
        return "no batch fits the memory and the constraints"
    assert best is not None
    mine, other = candidate.prediction, best.prediction
    behind = 1 - mine.throughput_tok_s / other.throughput_tok_s
    reason = f"{behind:.0%} slower"
    if behind < _ALIKE / 2:
        latency = mine.block_latency_s / other.block_latency_s
        reason = f"no faster by more than a hundredth, {latency:.2g} times the latency"
    return f"{reason}{'' if predicted else ', by estimate'}; limited by {RESOURCE_WORDS[mine.bottleneck]}"
