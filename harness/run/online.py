"""A launch whose requests arrive while the engine runs: one rate or a sweep of rates, its figures and its notes."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness import api, registry
from harness.api.machine import mean_cached_length, mean_generated
from harness.common.percentile import percentile
from harness.common.serving_figures import LATE_S, answered, figures, within
from harness.run.early_stop import EarlyStop
from harness.run.load_plan import LoadPlan
from harness.run.load_test import LoadTest, lags_of
from harness.run.rate_sweep import first_rate, highest_within, sweep

#: Conversations whose lengths tell an engine the mean length of its sequences.
_SAMPLED = 256


def sequence_lengths(spec: api.RunSpec) -> tuple[int, int, int]:
    """The most tokens that a sequence of an online workload can have, their mean over its life, and the mean of its new
    tokens."""
    workload = spec.workload
    lengths = []
    for conversation in itertools.islice(registry.arrivals(workload).conversations(2, spec.seed), _SAMPLED):
        before = 0
        for turn in conversation.turns:
            lengths.append((before + len(turn.prompt), turn.max_tokens))
            before += len(turn.prompt) + turn.max_tokens
    longest = workload.rounds * (workload.prompt_len + workload.gen_len)
    return longest, mean_cached_length(lengths), mean_generated(lengths)


@dataclass
class OnlineRun:
    """Loads a loaded engine with a cell's online workload. Raises UnsupportedError for an engine that takes no requests
    while it runs, HarnessError for sequences that exceed the context."""

    spec: api.RunSpec
    engine: api.Engine
    capabilities: api.Capabilities
    load: api.LoadReport
    on_event: api.EventSink

    def run(self) -> tuple[api.ServedRate, ...]:
        """Raw samples of every rate that was measured."""
        if not isinstance(self.engine, api.OnlineEngine):
            raise api.UnsupportedError(
                f"engine {self.spec.engine} takes no requests while it runs: give it a workload of kind synthetic"
            )
        self._online = self.engine
        longest, _, _ = sequence_lengths(self.spec)
        if longest > self.load.max_context:
            raise api.HarnessError(f"conversations of up to {longest} tokens exceed the model's context of "
                                   f"{self.load.max_context}: lower prompt_len, gen_len or rounds")  # fmt: skip
        workload = self.spec.workload
        if workload.rate != "sweep":
            return (self._measure(workload.rate, f"serving {workload.words.partition(',')[0]}"),)
        alone = self._alone()
        if workload.slo is not None and not within(alone, workload.slo):
            return (alone,)  # more requests at once only make it slower
        request_s = alone.requests[0].end_to_end_s if alone.requests and alone.requests[0].outcome == "ok" else 1.0
        rates = tuple(sweep(self._swept, first_rate(request_s), workload.slo))
        if any(map(answered, rates)):
            return rates
        return (alone, *(rate for rate in rates if rate.requests))

    def _swept(self, rate: float) -> api.ServedRate:
        return self._measure(rate, f"serving {rate:.3g} requests/s", swept=True)

    def _alone(self) -> api.ServedRate:
        """One conversation without any other: its rate is 0."""
        workload = self.spec.workload
        plan = LoadPlan(registry.arrivals(workload).conversations(self.load.vocab, self.spec.seed, 1e-9), 1, 1)
        return api.ServedRate(0.0, 0.0, self._drive(plan, None, "serving one request", workload.rounds))

    def _measure(self, rate: float | None, phase: str, swept: bool = False) -> api.ServedRate:
        """One rate. In a sweep requests are drawn for the rate, and what is unanswered after twice the time of the
        arrivals is cancelled: beyond saturation the queue grows without end."""
        workload = self.spec.workload
        drawn_at = rate if swept else None
        source = registry.arrivals(workload).conversations(self.load.vocab, self.spec.seed, drawn_at)
        count = None if workload.num_requests == "auto" else workload.num_requests
        window = math.inf if workload.duration_s is None else workload.duration_s
        plan = LoadPlan(source, workload.concurrency, count, window)
        expected = count or (round((rate or 0.0) * window) if window < math.inf else 0)
        deadline = None
        if drawn_at is not None:
            deadline = 2 * (window if window < math.inf else (count or 0) / drawn_at)
        requests = self._drive(plan, deadline, phase, expected * workload.rounds)
        window = min(window, plan.window_s)  # where it ended before its time
        if window == math.inf:  # of a number of requests: until the last one was due
            window = max((r.due_s for r in requests), default=0.0)
        return api.ServedRate(rate, window, requests)

    def _early_stop(self) -> EarlyStop | None:
        """What ends a rate before its time."""
        workload = self.spec.workload
        if workload.stop_when is None:
            return None
        latencies = ("normalized_s",) if workload.slo is None else tuple(workload.slo.limits)
        return EarlyStop(latencies, workload.stop_when.ci_width)

    def _drive(
        self, plan: LoadPlan, deadline_s: float | None, phase: str, expected: int
    ) -> tuple[api.ServedRequest, ...]:
        test = LoadTest(
            self._online, self.capabilities, plan, self.load.vocab, deadline_s, self.on_event, phase, expected,
            self._early_stop(),
        )  # fmt: skip
        return tuple(test.run())


def metrics_of(served: Sequence[api.ServedRate], slo: api.Slo | None, swept: bool) -> dict[str, float | None]:
    """Figures of a launch: of its rate, or of a sweep's highest rate within the objectives; without one, of the rate of
    most throughput."""
    fastest = max(served, key=lambda rate: figures(rate, None)["generation_throughput_tok_s"] or 0.0)
    if not swept:
        return figures(served[0], slo)
    best = highest_within(list(served), slo) if slo is not None else None
    out = figures(best or fastest, slo)
    out["saturated_req_s"] = max(figures(rate, None)["completed_req_s"] or 0.0 for rate in served)
    out["saturated_tok_s"] = figures(fastest, None)["generation_throughput_tok_s"]
    if slo is not None:
        out["highest_req_s"] = 0.0 if best is None or best.rate is None else best.rate
    return out


def notes_of(served: Sequence[api.ServedRate]) -> tuple[str, ...]:
    """What a reader of the figures must know of the launch."""
    requests = [request for rate in served for request in rate.requests]
    notes = []
    late = percentile(lags_of(requests), 99) or 0.0
    if late > LATE_S:
        notes.append(f"the load generator sent requests {1000 * late:.1f} ms late at the 99th percentile")
    reasons = Counter(request.reason for request in requests if request.outcome == "refused")
    if reasons:
        reason, _ = reasons.most_common(1)[0]
        notes.append(f"{sum(reasons.values())} of {len(requests)} requests were refused, such as: {reason}")
    short = sum(r.outcome == "ok" and len(r.token_times_s) < r.asked_tokens for r in requests)
    if short:
        notes.append(f"{short} of {len(requests)} answers are shorter than asked: the server does not ignore_eos")
    if unfinished := sum(request.outcome == "unfinished" for request in requests):
        notes.append(f"{unfinished} of {len(requests)} requests were cancelled beyond saturation")
    return tuple(notes)
