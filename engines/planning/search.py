"""The best policy for a machine: batches, order and bits are tried, fractions are a linear programme for each.

Source: FlexGen (Sheng et al. 2023), section 4.3; the bits and the host's attention decided by the model of their cost
as in LM-Offload (Wu et al. 2024), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from engines.planning.closed_form_planner import Prediction
from harness.api import RESOURCE_WORDS, Bits, OffloadPolicy, Schedule

_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024,
            1536, 2048)  # fmt: skip
_NUMBERS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40)
#: Of the lists, what is tried first; from the best of it the search climbs.
_STRIDE = 3
#: Kinds whose estimates are behind by less are predicted.
_CLOSE = 0.15
#: Of each of these kinds so many of the fastest, beside the soonest of them.
_PREDICTED = 1
#: Kinds of which there are predictions.
_KINDS = 3
#: Throughputs that differ by less are taken to be the same.
_ALIKE = 0.01


#: Of weights and cache, where the search decides.
_SEARCHED: tuple[Bits, ...] = (16, 8, 4)
ALL_BITS = tuple((weights, cache) for weights in _SEARCHED for cache in _SEARCHED)


_ANY = OffloadPolicy()


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen, and what must hold.

    `bits`: of weights and cache. `latency_s`: of a block, from its first token to its last. `requests`: of the
    whole job; a block has no room for more. `base`: what is chosen anyway.
    """

    schedules: Sequence[Schedule] = get_args(Schedule)
    bits: Sequence[tuple[Bits, Bits]] = ((16, 16),)
    cpu_attention: Sequence[bool] = (False, True)
    latency_s: float | None = None
    requests: int | None = None
    base: OffloadPolicy = _ANY


class Predictor(Protocol):
    """What makes predictions; see predict.py and host_only.py."""

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None: ...

    def estimate(self, policy: OffloadPolicy) -> Prediction: ...

    def predict(self, policy: OffloadPolicy) -> Prediction: ...


@dataclass(frozen=True)
class Candidate:
    """A policy that can be run as it stands, and what it will do."""

    policy: OffloadPolicy
    prediction: Prediction


@dataclass(frozen=True)
class Found:
    """The best policy, or none; and of each other kind (order, bits, attention) its best with the reason it lost."""

    best: Candidate | None
    rejected: Sequence[tuple[str, Candidate | None, str]]


#: Is told how many kinds of policies are looked at, and of how many.
Report = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """For those who do not want to know."""


def search(planner: Predictor, wanted: SearchSpace, report: Report = unheard) -> Found:
    """The policy of the highest throughput under all constraints.

    By estimates; of the few kinds whose best are nearly as good as the best of all, predictions of a few decide.
    """
    tried: dict[str, Sequence[Candidate]] = {}
    every = list(kinds(wanted))
    for i, kind in enumerate(every):
        report(i, len(every) + _KINDS)
        tried[_name(kind, len(wanted.cpu_attention) > 1)] = _tried(planner, kind, wanted)
    found = {name: _soonest(candidates) for name, candidates in tried.items()}
    most = max((c.prediction.throughput_tok_s for c in found.values() if c is not None), default=0.0)
    estimates = {name: c.prediction.throughput_tok_s for name, c in found.items() if c is not None}
    fastest = sorted(estimates, key=lambda name: -estimates[name])[:_KINDS]
    close = [name for name in fastest if estimates[name] >= (1 - _CLOSE) * most]
    for i, name in enumerate(close):
        report(len(every) + i, len(every) + _KINDS)
        found[name] = _confirmed(planner, tried[name], wanted)
    # where what was close is late after all, the best of the others by estimate
    best = _soonest(c for name in close if (c := found[name])) or _soonest(c for c in found.values() if c)
    guesses = planner.estimate != planner.predict
    if guesses and best is not None:
        found = _comparable(found, best, close, estimates)
    rejected = [
        (name, c, _reason(c, best, name in close or not guesses))
        for name, c in found.items()
        if c is None or c is not best
    ]
    rejected.sort(key=lambda item: -item[1].prediction.throughput_tok_s if item[1] else 0.0)
    return Found(best, rejected)


def _confirmed(planner: Predictor, tried: Sequence[Candidate], wanted: SearchSpace) -> Candidate | None:
    """The best of a few by their predictions: of the soonest of the fastest, and of the fastest by estimate."""
    soonest = _soonest(tried)
    fastest = sorted(tried, key=lambda c: -c.prediction.throughput_tok_s)[:_PREDICTED]
    few = [c.policy for c in (soonest, *fastest) if c]
    predicted = [Candidate(policy, planner.predict(policy)) for policy in dict.fromkeys(few)]
    return _soonest(c for c in predicted if _in_time(c, wanted))


def kinds(wanted: SearchSpace) -> Iterator[OffloadPolicy]:
    """What is chosen beside batches: order, bits and attention, each of a single sequence."""
    for schedule, (weight_bits, kv_bits), attention in itertools.product(
        wanted.schedules, wanted.bits, wanted.cpu_attention
    ):
        yield replace(
            wanted.base, gpu_batch_size=1, num_gpu_batches=1, schedule=schedule, weight_bits=weight_bits,
            kv_bits=kv_bits, cpu_attention=attention,
        )  # fmt: skip


def _tried(planner: Predictor, kind: OffloadPolicy, wanted: SearchSpace) -> list[Candidate]:
    """What fits, over batches and their number: from the best of a coarse grid uphill."""
    numbers = _NUMBERS if kind.schedule == "zigzag" else (1,)
    tried: dict[tuple[int, int], Candidate | None] = {}

    def score(at: tuple[int, int]) -> float:
        if at not in tried:
            size, number = _BATCHES[at[0]], numbers[at[1]]
            if wanted.requests is not None:
                size = min(size, -(-wanted.requests // number))
            tried[at] = _candidate(planner, replace(kind, gpu_batch_size=size, num_gpu_batches=number), wanted)
        candidate = tried[at]
        return candidate.prediction.throughput_tok_s if candidate else 0.0

    sizes = (range(0, len(_BATCHES), _STRIDE), range(0, len(numbers), _STRIDE))
    at = max(itertools.product(*sizes), key=score)
    while (better := max(_around(at, len(_BATCHES), len(numbers)), key=score)) != at and score(better) > score(at):
        at = better
    return [candidate for candidate in tried.values() if candidate is not None]


def _soonest(tried: Iterable[Candidate]) -> Candidate | None:
    """Of those that are as fast as the best, but for a hundredth, the one whose block is done first."""
    found = list(tried)
    most = max((c.prediction.throughput_tok_s for c in found), default=0.0)
    alike = [c for c in found if c.prediction.throughput_tok_s >= (1 - _ALIKE) * most]
    return min(alike, key=lambda c: c.prediction.block_latency_s, default=None)


def _around(at: tuple[int, int], rows: int, columns: int) -> Iterable[tuple[int, int]]:
    near = itertools.product(range(at[0] - 1, at[0] + 2), range(at[1] - 1, at[1] + 2))
    return [(i, j) for i, j in near if 0 <= i < rows and 0 <= j < columns]


def _candidate(planner: Predictor, policy: OffloadPolicy, wanted: SearchSpace) -> Candidate | None:
    """The policy with its best fractions, if there are any that fit and that do what is wanted."""
    runnable = planner.runnable(policy)
    if runnable is None:
        return None
    candidate = Candidate(runnable, planner.estimate(runnable))
    return candidate if _in_time(candidate, wanted) else None


def _in_time(candidate: Candidate, wanted: SearchSpace) -> bool:
    return wanted.latency_s is None or candidate.prediction.block_latency_s <= wanted.latency_s


def _name(kind: OffloadPolicy, attention: bool) -> str:
    """In words; `attention`: also where that is."""
    bits = (
        "exact"
        if kind.weight_bits == kind.kv_bits == 16
        else f"weights {kind.weight_bits} bit, cache {kind.kv_bits} bit"
    )
    where = f", attention on the {'host' if kind.cpu_attention else 'device'}" if attention else ""
    return f"{kind.schedule}, {bits}{where}"


def _comparable(
    found: Mapping[str, Candidate | None], best: Candidate, close: Sequence[str], estimates: Mapping[str, float]
) -> dict[str, Candidate | None]:
    """The same, with what was only estimated scaled as the best's estimate became its prediction."""
    name = next(name for name, candidate in found.items() if candidate is best)
    scale = best.prediction.throughput_tok_s / estimates[name]

    def scaled(name: str, one: Candidate | None) -> Candidate | None:
        if one is None or name in close:
            return one
        prediction = one.prediction
        return Candidate(one.policy, replace(prediction, throughput_tok_s=scale * prediction.throughput_tok_s))

    return {name: scaled(name, one) for name, one in found.items()}


def _reason(candidate: Candidate | None, best: Candidate | None, predicted: bool) -> str:
    if candidate is None:
        return "no batch fits the memory and the constraints"
    assert best is not None
    mine, other = candidate.prediction, best.prediction
    behind = 1 - mine.throughput_tok_s / other.throughput_tok_s
    if behind < _ALIKE / 2:
        told = (
            f"no faster by more than a hundredth, {mine.block_latency_s / other.block_latency_s:.2g} times the latency"
        )
    else:
        told = f"{behind:.0%} slower"
    return f"{told}{'' if predicted else ', by estimate'}; limited by {RESOURCE_WORDS[mine.bottleneck]}"
