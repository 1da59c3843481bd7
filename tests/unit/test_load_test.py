"""The load generator: who is sent when, latencies from when a request was due, sweeps, and what a launch says of it."""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from scipy.special import stdtrit

from engines.adapters.fake import MODEL, FakeEngine
from harness import api, registry
from harness.api import Conversation, ServedRate, ServedRequest, Slo, Turn, WorkloadSpec
from harness.common.serving_figures import attainment, figures, gaps, within
from harness.run.early_stop import EarlyStop
from harness.run.load_plan import LoadPlan, Session
from harness.run.load_test import LoadTest
from harness.run.online import OnlineRun, metrics_of, notes_of, sequence_lengths
from harness.run.rate_sweep import PRECISION, first_rate, highest_within, sweep


def conversation(name: str, at: float, *turns: tuple[int, int, float]) -> Conversation:
    return Conversation(name, at, tuple(Turn((9,) * prompt, count, think) for prompt, count, think in turns))


def loaded(**options: object) -> FakeEngine:
    engine = FakeEngine(**options)
    job = api.Job(None, None, 100, 50)
    engine.load(MODEL, api.OffloadPolicy(gpu_batch_size=2), api.HardwareLimits(), job)
    return engine


def driven(
    engine: api.OnlineEngine, plan: LoadPlan, deadline_s: float | None = None, **capabilities: bool
) -> list[ServedRequest]:
    known = api.Capabilities(**({"simulated": True} | capabilities))
    return LoadTest(engine, known, plan, 1000, deadline_s, api.ignore_events, "", 1).run()


def test_latencies_count_from_when_a_request_was_due_and_not_from_when_work_began() -> None:
    plan = LoadPlan(iter([conversation(f"c{i}", 0.5 * i, (3, 10, 0.0)) for i in range(3)]))
    one, two, three = driven(loaded(rate_tok_s=10.0), plan)  # a token takes 0.1 s alone, 0.2 s beside another
    assert (one.due_s, one.start_s, one.ttft_s, one.tpot_s) == (0.0, 0.0, 0.1, pytest.approx((1.5 - 0.1) / 9))
    assert two.due_s == 0.5
    assert three.due_s == 1.0
    assert three.queue_s == pytest.approx(three.start_s - 1.0)
    assert three.queue_s > 0.3
    assert three.ttft_s == pytest.approx(three.token_times_s[0] - 1.0)
    assert three.normalized_s == pytest.approx(three.end_to_end_s / 10)
    assert [r.sent_s for r in (one, two, three)] == [0.0, 0.5, 1.0]


def test_a_turn_is_sent_after_its_answer_and_the_pause_with_all_before_it() -> None:
    plan = LoadPlan(iter([conversation("c", 1.0, (3, 2, 0.0), (4, 3, 5.0), (1, 1, 2.0))]))
    first, second, third = driven(loaded(rate_tok_s=10.0), plan)
    assert [r.id for r in (first, second, third)] == ["c.0", "c.1", "c.2"]
    assert [r.prompt_tokens for r in (first, second, third)] == [3, 3 + 2 + 4, 9 + 3 + 1]
    assert second.due_s == pytest.approx(first.token_times_s[-1] + 5.0)
    assert third.due_s == pytest.approx(second.token_times_s[-1] + 2.0)
    assert [r.round for r in (first, second, third)] == [0, 1, 2]


def test_a_closed_loop_keeps_its_users_busy_and_ignores_arrivals() -> None:
    plan = LoadPlan(iter([conversation(f"c{i}", 1000.0, (1, 2, 0.0)) for i in range(5)]), users=2, count=4)
    served = driven(loaded(rate_tok_s=10.0), plan)
    assert [r.due_s for r in served] == pytest.approx([0.0, 0.0, 0.4, 0.4])
    assert len(served) == 4


def test_nothing_begins_after_the_window_and_what_began_is_finished() -> None:
    source = [conversation(f"c{i}", float(i), (1, 30, 0.0), (1, 1, 9.0)) for i in range(10)]
    served = driven(loaded(rate_tok_s=10.0), LoadPlan(iter(source), window_s=3.0))
    assert {r.id for r in served} == {f"c{i}.{k}" for i in range(3) for k in range(2)}
    assert all(r.outcome == "ok" for r in served)


def test_the_deadline_cancels_what_is_pending_and_the_engine_is_idle() -> None:
    engine = loaded(rate_tok_s=1.0)
    served = driven(engine, LoadPlan(iter([conversation(f"c{i}", 0.0, (1, 9, 0.0)) for i in range(4)])), 5.0)
    assert {r.outcome for r in served} == {"unfinished"}
    assert len(served) == 4
    assert engine.pending() == 0


def test_a_refused_request_is_kept_with_its_reason_and_ends_its_conversation() -> None:
    source = [conversation("long", 0.0, (90, 20, 0.0), (1, 1, 0.0)), conversation("short", 0.0, (1, 1, 0.0))]
    served = {r.id: r for r in driven(loaded(longest=100), LoadPlan(iter(source)))}
    assert served["long.0"].outcome == "refused"
    assert "holds 100 tokens" in served["long.0"].reason
    assert served["short"].outcome == "ok"
    assert set(served) == {"long.0", "short"}


def test_an_engine_that_cuts_answers_short_gets_no_figures() -> None:
    class Short(FakeEngine):
        def step(self) -> list[api.Event]:
            return [
                api.FinishedEvent(replace(e.result, tokens=e.result.tokens[:-1]))
                if isinstance(e, api.FinishedEvent) else e
                for e in super().step()
            ]  # fmt: skip

    engine = Short()
    engine.load(MODEL, api.OffloadPolicy(), api.HardwareLimits(), api.Job(None, None, 9, 9))
    with pytest.raises(api.HarnessError, match="1 tokens instead of 2"):
        driven(engine, LoadPlan(iter([conversation("c", 0.0, (1, 2, 0.0))])))


class Stuck(FakeEngine):
    """Its first pass waits until the generator has sent as many requests as `until`."""

    def __init__(self, until: int) -> None:
        super().__init__(rate_tok_s=1000.0)
        self.until, self.sent, self.waited = until, 0, False
        self.submitted_by: set[str] = set()
        self.enough = threading.Event()

    def seen(self) -> None:
        self.sent += 1
        if self.sent == self.until:
            self.enough.set()

    def submit(self, request: api.GenerationRequest) -> None:
        self.submitted_by.add(threading.current_thread().name)
        super().submit(request)

    def step(self) -> list[api.Event]:
        if not self.waited:
            self.waited = True
            assert self.enough.wait(30), "the generator waited for the engine"
        return super().step()


class Counted(LoadPlan):
    on_sent: Callable[[], None]

    def sent(self, session: Session) -> None:
        super().sent(session)
        self.on_sent()


@pytest.mark.parametrize("remote", [False, True])
def test_requests_are_sent_while_a_pass_is_stuck(remote: bool) -> None:
    engine = Stuck(6)
    engine.load(MODEL, api.OffloadPolicy(gpu_batch_size=9), api.HardwareLimits(), api.Job(None, None, 9, 9))
    plan = Counted(iter([conversation(f"c{i}", 0.001 * i, (1, 2, 0.0)) for i in range(6)]))
    plan.on_sent = engine.seen
    served = driven(engine, plan, simulated=False, remote=remote)
    assert [r.id for r in sorted(served, key=lambda r: r.id)] == [f"c{i}" for i in range(6)]
    assert engine.submitted_by == {"load generator" if remote else "MainThread"}
    assert all(r.sent_s >= r.due_s for r in served)
    assert all((r.digest == "") == remote for r in served)


@pytest.mark.parametrize("remote", [False, True])
def test_an_engine_that_fails_ends_the_load(remote: bool) -> None:
    class Broken(FakeEngine):
        def submit(self, request: api.GenerationRequest) -> None:
            raise MemoryError("no room")

    engine = Broken()
    engine.load(MODEL, api.OffloadPolicy(), api.HardwareLimits(), api.Job(None, None, 9, 9))
    plan = LoadPlan(iter([conversation("c", 0.0, (1, 2, 0.0))]))
    with pytest.raises(MemoryError, match="no room"):
        driven(engine, plan, simulated=False, remote=remote)


def test_histories_have_stand_ins_for_the_ids_that_a_server_does_not_tell() -> None:
    plan = LoadPlan(iter([conversation("c", 0.0, (3, 2, 0.0), (1, 1, 0.0))]))
    session = plan.take(0.0)
    plan.sent(session)
    plan.answered(session, 1.0, (-1, -1))
    assert plan.take(1.0).request().prompt == (9, 9, 9, 9, 9, 9)


def request(due: float, *times: float, outcome: str = "ok", sent: float = 0.0) -> ServedRequest:
    return ServedRequest("r", due, due + sent, 5, times, due, outcome)


def test_figures_of_a_rate() -> None:
    rate = ServedRate(2.0, 4.0, (request(0.0, 1.0, 2.0, 3.0), request(1.0, 5.0), request(2.0, outcome="refused")))
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    found = figures(rate, slo)
    assert found["offered_req_s"] == 3 / 4
    assert found["completed_req_s"] == 2 / 5  # the last token came after the window
    assert found["generation_throughput_tok_s"] == 4 / 5
    assert found["goodput_req_s"] == 1 / 5
    assert found["slo_attainment"] == attainment(rate, slo) == pytest.approx(1 / 3)
    assert found["refused_requests"] == 1
    assert found["ttft_p50_s"] == 2.5
    assert gaps(rate.requests) == [1.0, 1.0]


def test_a_rate_is_within_its_objectives_by_share_or_by_mean() -> None:
    rate = ServedRate(1.0, 1.0, tuple(request(0.0, t) for t in (0.1, 0.1, 0.1, 0.5)))
    assert within(rate, Slo(ttft_s=0.2, attainment=0.75))
    assert not within(rate, Slo(ttft_s=0.2, attainment=0.8))
    assert within(rate, Slo(ttft_s=0.2001, attainment="mean"))
    assert not within(rate, Slo(ttft_s=0.19, attainment="mean"))
    lost = replace(rate, requests=(*rate.requests, request(0.0, outcome="refused")))
    assert not within(lost, Slo(ttft_s=9.0, attainment="mean"))
    assert not within(replace(rate, requests=()), Slo(ttft_s=9.0))


def served_at(rate: float, capacity: float, latency: Callable[[float], float]) -> ServedRate:
    """A server that answers `capacity` requests a second at most."""
    count, window = 20, 20 / rate
    done = max(window, count / capacity)
    requests = tuple(request(done * i / count - latency(rate), done * i / count) for i in range(1, count + 1))
    return ServedRate(rate, window, requests)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 40.0), st.floats(0.02, 64.0), st.booleans())
def test_a_sweep_finds_the_highest_rate_within_the_objectives(limit: float, start: float, mean: bool) -> None:
    slo = Slo(ttft_s=1.0, attainment="mean" if mean else 0.9)
    start = first_rate(1 / start)

    def measure(rate: float) -> ServedRate:
        asked.append(rate)
        return served_at(rate, 1e9, lambda r: 0.5 if r <= limit else 2.0)

    asked: list[float] = []
    best = highest_within(sweep(measure, start, slo), slo)
    assert len(asked) == len(set(asked))
    if best is None:
        assert limit < start / 2**11
    else:
        assert best.rate is not None
        assert best.rate <= limit
        assert best.rate * PRECISION * 1.01 >= min(limit, start * 2**12)


def test_a_sweep_stops_where_throughput_does_not_rise() -> None:
    measured = sweep(lambda rate: served_at(rate, 3.0, lambda r: 0.1), 1.0, Slo(ttft_s=1.0))
    assert [m.rate for m in measured] == [1.0, 2.0, 4.0, 8.0]
    assert [m.rate for m in sweep(lambda rate: served_at(rate, 3.0, lambda r: 0.1), 1.0, None)] == [1.0, 2.0, 4.0, 8.0]


def test_no_rate_is_within_impossible_objectives() -> None:
    slo = Slo(ttft_s=0.01)
    measured = sweep(lambda rate: served_at(rate, 3.0, lambda r: 0.1), 1.0, slo)
    assert highest_within(measured, slo) is None
    assert metrics_of(measured, slo, True)["highest_req_s"] == 0.0


def run(spec: api.RunSpec, **options: object) -> tuple[ServedRate, ...]:
    engine = loaded(**options)
    load = api.LoadReport(1000, 4096, 2, spec.policy, "float32", (0, 0, 0))
    return OnlineRun(spec, engine, engine.capabilities(), load, api.ignore_events).run()


def spec_of(**workload: object) -> api.RunSpec:
    return api.RunSpec("fake", api.ModelSpec("fake"), WorkloadSpec("arrivals", 8, 4, **workload))


def test_a_sweep_of_the_fake_engine_repeats_exactly_and_ends_near_its_capacity() -> None:
    spec = spec_of(rate="sweep", duration_s=100.0, slo=Slo(normalized_s=0.5, attainment="mean"))
    first = run(spec, rate_tok_s=10.0)
    assert first == run(spec, rate_tok_s=10.0)
    best = metrics_of(first, spec.workload.slo, True)
    assert 1.3 < best["highest_req_s"] < 2.5  # 10 tokens/s, 4 tokens a request
    assert best["saturated_tok_s"] == pytest.approx(10.0, rel=0.15)


def test_requests_that_were_cancelled_beyond_saturation_are_noted() -> None:
    lost = request(0.0, outcome="unfinished")
    assert notes_of([ServedRate(1.0, 1.0, (lost, request(0.0, 1.0)))]) == (
        "1 of 2 requests were cancelled beyond saturation",
    )


def test_a_sweep_of_a_slow_server_begins_where_requests_come() -> None:
    def measure(rate: float) -> ServedRate:
        return served_at(rate, 1e9, lambda r: 0.5 if r <= 1 else 2.0) if rate >= 0.125 else ServedRate(rate, 20.0, ())

    best = highest_within(sweep(measure, 2**-5, Slo(ttft_s=1.0)), Slo(ttft_s=1.0))
    assert best is not None and 1 / PRECISION / 1.01 <= best.rate <= 1
    assert not any(m.requests for m in sweep(lambda r: ServedRate(r, 20.0, ()), 1.0, Slo(ttft_s=1.0)))


def test_a_sweep_that_halves_ends_where_nobody_comes() -> None:
    rates: list[float] = []

    def measure(rate: float) -> ServedRate:
        rates.append(rate)
        return served_at(rate, 1e9, lambda _: 2.0) if rate >= 0.25 else ServedRate(rate, 20.0, ())

    assert highest_within(sweep(measure, 1.0, Slo(ttft_s=1.0)), Slo(ttft_s=1.0)) is None
    assert rates == [1.0, 0.5, 0.25, 0.125]


def test_a_sweep_in_whose_rates_nobody_comes_keeps_the_request_that_was_alone() -> None:
    """One request takes years, and arrivals last 1 s."""
    (alone,) = run(spec_of(rate="sweep", duration_s=1.0, slo=Slo(ttft_s=1e9)), rate_tok_s=1e-7)
    assert alone.rate == 0.0 and alone.requests[0].outcome == "ok"


def test_a_rate_above_one_that_is_not_within_does_not_count() -> None:
    measured = [served_at(rate, 1e9, lambda r: 2.0 if r == 2.0 else 0.1) for rate in (1.0, 2.0, 4.0)]
    best = highest_within(measured, Slo(ttft_s=1.0))
    assert best is not None and best.rate == 1.0


def test_a_rate_ends_once_its_latency_is_known_closely_enough() -> None:
    """Evenly spaced equal requests do not differ; bursts do, and are measured for their whole time."""
    wanted = api.StopWhen(0.05)
    even, burst = (
        run(spec_of(rate=1.0, duration_s=400.0, stop_when=wanted, **process), rate_tok_s=100.0)[0]
        for process in ({"process": "constant"}, {"process": "gamma", "cv": 8.0})
    )
    assert 100 <= len(even.requests) < 130
    assert even.window_s == pytest.approx(len(even.requests), abs=2.0), "offered rates are over the time of arrivals"
    assert figures(even, None)["offered_req_s"] == pytest.approx(1.0, abs=0.02)
    assert all(r.outcome == "ok" for r in even.requests)
    assert burst.window_s == 400.0


def test_a_rate_is_looked_at_again_at_twice_as_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after every answer: some interval is narrow by chance. What the rule says is taken at once."""
    looks: list[int] = []

    def is_enough(self: EarlyStop, requests: Sequence[ServedRequest]) -> bool:
        looks.append(len(requests))
        return len(looks) == 3

    monkeypatch.setattr(EarlyStop, "__call__", is_enough)
    served = run(spec_of(rate=1.0, duration_s=900.0, process="constant", stop_when=api.StopWhen(0.05)),
                 rate_tok_s=100.0)[0]  # fmt: skip
    assert looks == pytest.approx([100, 200, 400], abs=2)
    assert len(served.requests) == pytest.approx(400, abs=3)


@pytest.mark.parametrize("width", [0.1, 0.3])
def test_an_interval_of_batch_means_holds_the_mean_as_often_as_it_says(width: float) -> None:
    """Of waiting times that depend on those before them: where a sample is called close, its mean is."""
    close = right = 0
    for seed in range(300):
        rng, wait, served = random.Random(seed), 1.0, []
        for i in range(400):
            wait = max(0.01, 1.0 + 0.5 * (wait - 1.0) + rng.gauss(0, 0.2))
            served.append(request(float(i), i + wait))
        if EarlyStop(["ttft_s"], width)(served):
            close += 1
            right += abs(sum(r.ttft_s for r in served) / len(served) - 1.0) <= width / 2
    assert close > 30
    assert right >= 0.9 * close


def test_a_refused_request_or_too_few_tell_nothing() -> None:
    served = [request(float(i), i + 1.0) for i in range(100)]
    is_close = EarlyStop(["ttft_s"], 0.01)
    assert is_close(served)
    assert not is_close(served[:99])
    assert not is_close([*served, request(100.0, outcome="refused")])


def test_intervals_hold_the_mean_at_all_looks_together() -> None:
    """Of waiting times that depend on those before them, in ten thousand streams. Intervals that are made as if each
    were the only one, as `once` is, miss it in three times as many as they say."""
    streams, looks, memory = 10_000, (100, 200, 400, 800), 0.5
    noise = np.random.default_rng(0).standard_normal((streams, looks[-1])) * 0.2
    waits = 1.0 + lfilter([1.0], [1.0, -memory], noise, axis=1)
    outside, once = np.zeros(streams, bool), np.zeros(streams, bool)
    for look, count in enumerate(looks, 1):
        rule = EarlyStop(["ttft_s"], 0.05)
        low, high = np.array([rule.interval(stream, look) for stream in waits[:, :count].tolist()]).T
        outside |= (low > 1.0) | (high < 1.0)
        half = (high - low) / 2 * stdtrit(9, 0.975) / stdtrit(9, 1 - 0.025 / (look * (look + 1)))
        once |= abs((low + high) / 2 - 1.0) > half
    assert outside.mean() <= 0.05
    assert once.mean() > 0.15


def test_what_was_due_by_the_end_is_sent() -> None:
    """Arrivals that were due while the last pass ran belong to the time over which the rate counts."""
    plan = LoadPlan(iter([conversation(f"c{i}", 0.5 * i, (1, 2, 0.0)) for i in range(9)]))
    first = plan.take(0.0)
    plan.sent(first)
    plan.answered(first, 1.7, (1, 2))
    plan.end(1.75)
    sent = []
    while plan.next_due() is not None:
        sent.append(plan.take(1.8))
        plan.sent(sent[-1])
    assert [session.due_s for session in sent] == [0.5, 1.0, 1.5]
    assert plan.window_s == 1.75 and not plan.done, "they have no answers yet"


def test_requests_are_sent_while_the_rule_looks_whether_a_rate_may_end() -> None:
    class Timed(FakeEngine):
        def clock(self) -> float:
            return time.monotonic()

    engine = Timed()
    engine.load(MODEL, api.OffloadPolicy(gpu_batch_size=9), api.HardwareLimits(), api.Job(None, None, 9, 9))
    plan = Counted(iter([conversation(f"c{i}", 0.002 * i, (1, 1, 0.0)) for i in range(120)]))
    sent, more = itertools.count(1), threading.Event()
    plan.on_sent = lambda: more.set() if next(sent) == 110 else None

    def is_enough(requests: Sequence[ServedRequest]) -> bool:
        assert more.wait(30), "the generator waits for the rule"
        return True

    known = api.Capabilities(simulated=False, remote=False)
    served = LoadTest(engine, known, plan, 1000, None, api.ignore_events, "", 1, is_enough).run()
    assert len(served) >= 110
    assert {r.id for r in served} == {f"c{i}" for i in range(120) if 0.002 * i < plan.window_s}


def test_a_request_that_is_too_slow_alone_ends_a_sweep() -> None:
    served = run(spec_of(rate="sweep", duration_s=100.0, slo=Slo(ttft_s=1e-6)))
    assert [(s.rate, len(s.requests)) for s in served] == [(0.0, 1)]


def test_a_number_of_requests_ends_a_load() -> None:
    (served,) = run(spec_of(rate=5.0, num_requests=7))
    assert len(served.requests) == 7
    assert served.window_s == max(r.due_s for r in served.requests)


def test_what_an_engine_and_a_context_cannot_do_is_told() -> None:
    spec = spec_of(rate=5.0, num_requests=7)
    load = api.LoadReport(1000, 11, 2, spec.policy, "float32", (0, 0, 0))
    engine = loaded()
    with pytest.raises(api.HarnessError, match="up to 12 tokens exceed the model's context of 11"):
        OnlineRun(spec, engine, engine.capabilities(), load, api.ignore_events).run()
    offline = registry.make_engine("fake", {})
    cut = type("Offline", (), {n: getattr(offline, n) for n in ("generate", "score", "load", "close", "trace")})()
    with pytest.raises(api.UnsupportedError, match="engine fake takes no requests while it runs"):
        OnlineRun(spec, cut, engine.capabilities(), load, api.ignore_events).run()
    chat = replace(spec, workload=WorkloadSpec("conversation", 8, 4, rate=1.0, duration_s=9.0, rounds=3))
    assert sequence_lengths(chat)[0] == 36


def test_a_late_generator_and_lost_requests_are_noted() -> None:
    punctual = [request(0.0, 1.0, sent=0.001)] * 99
    assert notes_of([ServedRate(1.0, 1.0, tuple(punctual))]) == ()
    late: Sequence[ServedRequest] = [*punctual[:97], *[request(0.0, 1.0, sent=0.02)] * 3]
    assert notes_of([ServedRate(1.0, 1.0, tuple(late))]) == (
        "the load generator sent requests 20.0 ms late at the 99th percentile",
    )
    refused = replace(request(0.0, outcome="refused"), reason="HTTP 503: busy")
    assert notes_of([ServedRate(1.0, 1.0, (refused, request(0.0, 1.0)))]) == (
        "1 of 2 requests were refused, such as: HTTP 503: busy",
    )


def test_a_plan_without_requests_is_done_at_once() -> None:
    assert driven(loaded(), LoadPlan(iter([]))) == []
    assert driven(loaded(), LoadPlan(iter([conversation("c", 5.0, (1, 1, 0.0))]), window_s=5.0)) == []
    assert math.isinf(LoadPlan(iter([])).window_s)
