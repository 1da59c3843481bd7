"""Figures of task answers, each compared with exact answers to the same examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.api import Accuracy, OffloadPolicy
from reports.stats import FEWEST, Paired, paired
from reports.summary import CellSummary

#: The suffix of figures whose outcomes are mean log-likelihoods, in nats.
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Judged:
    """A figure of a cell's answers. `error` is its standard error.

    `against`: the accuracy with whose answers it is compared: for exact arithmetic the reference's, else the exact
    one's of the same engine. None where there is none, or it is this one.
    """

    row: CellSummary
    name: str
    value: float
    error: float | None
    accuracy: Accuracy
    exact: bool
    against: Accuracy | None

    @property
    def is_perplexity(self) -> bool:
        """Whether lower is better, and differences are factors."""
        return self.name.endswith(PERPLEXITY)

    @cached_property
    def pairs(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The outcomes of the other side and of this one, of the same examples; None where they do not match."""
        other = tuple(self.against.outcomes.get(self.name, ())) if self.against else ()
        own = tuple(self.accuracy.outcomes.get(self.name, ()))
        return (other, own) if own and len(own) == len(other) else None

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the examples; empty for equal ones."""
        return tuple(self.accuracy.weights.get(self.name, ()))

    @cached_property
    def compared(self) -> Paired | None:
        """The paired comparison; None without matching outcomes, and of too few examples."""
        if self.pairs is None or len(self.pairs[0]) < FEWEST:
            return None
        return paired(*self.pairs, self.weights)

    @property
    def change(self) -> tuple[str, str] | None:
        """The difference and its interval as text; of perplexities, whose outcomes are log-likelihoods, as a factor."""
        if (found := self.compared) is None:
            return None
        if self.is_perplexity:  # it falls as likelihoods rise
            middle, low, high = (math.exp(-d) - 1 for d in (found.difference, found.high, found.low))
            return f"{middle:+.2%}", f"{low:+.2%} to {high:+.2%}"
        return f"{found.difference:+.3g}", f"{found.low:+.3g} to {found.high:+.3g}"


def accuracy_of(row: CellSummary) -> Accuracy | None:
    """The accuracy of the first ok repeat; the others have the same seed and the same answers."""
    return next((r.accuracy for r in row.ok_records if r.accuracy), None)


def judged(rows: Sequence[CellSummary]) -> list[Judged]:
    """Each figure of each cell that ran a task, in the order of the cells."""
    results = [(row, accuracy) for row in rows if (accuracy := accuracy_of(row))]
    exact_by_engine = {row.engine: accuracy for row, accuracy in results if _is_exact(_policy_of(row))}
    reference = next((accuracy for row, accuracy in results if row.reference), None)
    found = []
    for row, accuracy in results:
        exact = exact_by_engine.get(row.engine)
        is_exact = exact is accuracy
        against = reference if is_exact else exact
        against = None if against is accuracy else against
        found += [
            Judged(row, name, value, accuracy.figures.get(f"{name}_stderr"), accuracy, is_exact, against)
            for name, value in accuracy.figures.items()
            if not name.endswith("_stderr")
        ]
    return found


def _policy_of(row: CellSummary) -> OffloadPolicy:
    """The policy that a cell's answers were given by: with the settings that a search chose."""
    return next((r.load.policy for r in row.ok_records if r.accuracy and r.load), row.spec.policy)


def _is_exact(policy: OffloadPolicy) -> bool:
    whole = policy.weight_bits == policy.kv_bits == 16 and policy.value_sparsity == 1
    return whole and policy.wire_bits is None and policy.compute_dtype != "int8"
