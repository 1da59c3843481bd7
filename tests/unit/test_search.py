"""What a search of policies says of those that it rejects, and that it keeps what it was told."""

from dataclasses import replace

import pytest

from engines.models.shapes import shape
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.planned_job import PlannedJob
from engines.planning.search import Candidate, SearchResult, SearchSpace, search
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import Bits, OffloadPolicy

JOB = PlannedJob(shape("facebook/opt-30b"), [Lengths(512, 32)])
T4 = hardware.load("t4_gcp")


class StubPlanner(ClosedFormPlanner):
    """Predicts a rate for each kind, and that blocks take as long as they have sequences; 8-bit caches fit nowhere."""

    batch_sizes = (1, 2, 3, 4, 6, 8)

    def __init__(self, rates: dict[tuple[Bits, Bits], float], most: int = 8, optimism: float = 1.0) -> None:
        super().__init__(JOB, T4, engine_cost_model("offload"))
        self.rates, self.most, self.optimism = rates, most, optimism
        self.predicted: list[OffloadPolicy] = []

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        return None if policy.kv_bits == 8 or policy.block_size > self.most else policy

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        return self._made(policy, self.optimism)

    def predict(self, policy: OffloadPolicy) -> Prediction:
        self.predicted.append(policy)
        return self._made(policy, 1.0)

    def _made(self, policy: OffloadPolicy, factor: float) -> Prediction:
        whole = replace(policy, weights=(0.0, 1.0, 0.0), cache=(0.0, 1.0, 0.0), activations=(0.0, 1.0, 0.0))
        rate = factor * self.rates[policy.weight_bits, policy.kv_bits] * policy.block_size
        base = ClosedFormPlanner.estimate(self, whole)
        return replace(base, throughput_tok_s=rate, block_latency_s=float(policy.block_size), bottleneck="disk")


RATES: dict[tuple[Bits, Bits], float] = {(16, 16): 1.0, (16, 4): 3.0, (4, 16): 2.0, (4, 4): 4.0}
SPACE = SearchSpace(("row",), [*RATES, (4, 8)], (False,))


def shown(found: SearchResult) -> list[tuple[str, float | None, str]]:
    return [(name, c and c.prediction.throughput_tok_s, reason) for name, c, reason in found.rejected]


def test_what_was_rejected_is_listed_from_the_fastest_on_with_what_it_lacks() -> None:
    """A kind is exact only where both weights and cache are in 16 bits."""
    found = search(StubPlanner(RATES), SPACE)
    assert found.best is not None
    policy = found.best.policy
    assert (policy.weight_bits, policy.kv_bits, policy.gpu_batch_size) == (4, 4, 8)
    assert shown(found) == [
        ("row, weights 16 bit, cache 4 bit", 24.0, "25% slower, by estimate; limited by the disk"),
        ("row, weights 4 bit, cache 16 bit", 16.0, "50% slower, by estimate; limited by the disk"),
        ("row, exact", 8.0, "75% slower, by estimate; limited by the disk"),
        ("row, weights 4 bit, cache 8 bit", None, "no batch fits the memory and the constraints"),
    ]


def test_where_attention_runs_is_told_where_it_is_searched() -> None:
    found = search(StubPlanner(RATES), replace(SPACE, bits=[(16, 16)], cpu_attention=(False, True)))
    assert found.best is not None
    assert {name for name, _, _ in found.rejected} == {"row, exact, attention on the host"}
    assert shown(found)[0][2] == "no faster by more than a hundredth, 1 times the latency; limited by the disk"


def test_estimates_are_scaled_to_the_prediction_of_the_best() -> None:
    """They were three times too high. Kinds within 15 % of the best estimate are predicted, and the third, whose
    estimate (48) is above the best prediction."""
    close: dict[tuple[Bits, Bits], float] = {**RATES, (16, 4): 3.5}
    planner = StubPlanner(close, optimism=3.0)
    found = search(planner, SPACE)
    assert found.best is not None
    assert found.best.prediction.throughput_tok_s == 32.0
    assert {(p.weight_bits, p.kv_bits) for p in planner.predicted} == {(4, 4), (16, 4), (4, 16)}
    assert shown(found)[:3] == [
        ("row, weights 16 bit, cache 4 bit", 28.0, "12% slower; limited by the disk"),
        ("row, weights 4 bit, cache 16 bit", 16.0, "50% slower; limited by the disk"),
        ("row, exact", 8.0, "75% slower, by estimate; limited by the disk"),
    ]


@pytest.mark.parametrize(
    ("latency", "requests", "size"), [(6.0, None, 6), (5.9, None, 4), (None, 5, 5), (0.5, None, 0)]
)
def test_limits_on_latency_and_requests_are_kept_to_the_last_sequence(
    latency: float | None, requests: int | None, size: int
) -> None:
    """Each sequence takes a second here."""
    found = search(StubPlanner(RATES), replace(SPACE, bits=[(4, 4)], latency_s=latency, requests=requests))
    assert (found.best.policy.block_size if found.best else 0) == size


def test_of_equal_throughputs_the_soonest_is_chosen() -> None:
    """Within a hundredth: rates that do not grow with the batch are those of the smallest."""

    class Flat(StubPlanner):
        def _made(self, policy: OffloadPolicy, factor: float) -> Prediction:
            grown = 1 + 0.001 * policy.block_size
            return replace(super()._made(policy, factor), throughput_tok_s=10 * grown)

    found = search(Flat(RATES), replace(SPACE, bits=[(4, 4)]))
    assert isinstance(found.best, Candidate)
    assert found.best.policy.gpu_batch_size == 1


def test_how_far_a_search_is_counts_each_kind_once() -> None:
    told: list[tuple[int, int]] = []
    search(StubPlanner(RATES), SPACE, lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(set(done))
    assert done[0] == 0
    assert len(set(totals)) == 1
    assert done[-1] < totals[0]
