"""The fake engine repeats exactly and misbehaves exactly as told."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from engines.adapters.fake import MODEL, SHAPE, FakeEngine
from harness import api

JOB = api.Job(Path("unused"), Path("unused"), 64, 32)


def loaded(policy=None, **options):
    engine = FakeEngine(**options)
    engine.load(MODEL, policy or api.OffloadPolicy(), api.HardwareLimits(), JOB)
    return engine


def requests(count, max_tokens=4, seed=None):
    return [api.GenerationRequest(f"r{i}", (i, i + 1), api.SamplingParams(max_tokens, seed=seed)) for i in range(count)]


def test_results_repeat_and_depend_on_seed_and_prompt():
    first = list(loaded().generate(requests(3)))
    assert first == list(loaded().generate(requests(3)))
    assert len({r.tokens for r in first}) == 3
    assert first[0].tokens != next(loaded().generate(requests(1, seed=7))).tokens
    assert all(0 <= t < SHAPE.vocab for r in first for t in r.tokens)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_virtual_clock_gives_the_stated_rate_at_any_batch(batch):
    results = list(loaded(api.OffloadPolicy(gpu_batch_size=batch), rate_tok_s=500).generate(requests(8)))
    end = max(r.token_times_s[-1] for r in results)
    assert sum(len(r.tokens) for r in results) / end == pytest.approx(500)
    assert len({r.start_s for r in results}) == 8 // batch


def test_score_is_greedy_for_its_own_tokens_only():
    engine = loaded()
    result = next(engine.generate(requests(1)))
    own, other = engine.score([((0, 1), result.tokens), ((0, 1), (1, 2, 3))])
    assert own.is_greedy and not other.is_greedy
    assert own.logprob < 0 and own == engine.score([((0, 1), result.tokens)])[0]


def test_unknown_option_is_a_type_error():
    with pytest.raises(TypeError):
        FakeEngine(speed=1)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"policy": api.OffloadPolicy(schedule="zigzag")}, api.UnsupportedError, "schedule"),
        ({"crash": "unsupported"}, api.UnsupportedError, None),
        ({"crash": "infeasible"}, api.InfeasibleError, None),
    ],
)
def test_refusals_happen_in_load(asked, kind, words):
    with pytest.raises(kind, match=words):
        loaded(**asked)


@pytest.mark.parametrize(("crash", "kind"), [("exception", RuntimeError), ("memory_error", MemoryError)])
def test_crashes_happen_in_generate(crash, kind):
    with pytest.raises(kind):
        list(loaded(crash=crash).generate(requests(2)))


def test_enospc_and_device_memory_look_like_the_real_ones():
    with pytest.raises(OSError) as disk:
        list(loaded(crash="enospc").generate(requests(1)))
    assert disk.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="out of memory") as device:
        list(loaded(crash="oom_device").generate(requests(1)))
    assert type(device.value).__name__ == "OutOfMemoryError"


@pytest.mark.parametrize(("crash", "status"), [("sigkill", -9), ("segv", -11), ("exit", 3)])
def test_deaths_take_the_process(crash, status):
    code = (
        "from pathlib import Path; from engines.adapters.fake import *; from harness.api import *; "
        f"e = FakeEngine(crash={crash!r}); job = Job(Path('unused'), Path('unused'), 64, 32); "
        "e.load(MODEL, OffloadPolicy(), HardwareLimits(), job); "
        "list(e.generate([GenerationRequest('a', (1,))]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status


def test_wrong_results():
    right = list(loaded().generate(requests(3)))

    def wrong(**options) -> list[api.GenerationResult]:
        return list(loaded(**options).generate(requests(3)))

    assert [r.id for r in wrong(lose_request=True)] == ["r0", "r1"]
    assert {len(r.tokens) for r in wrong(wrong_count=True)} == {3}
    assert {r.tokens for r in wrong(nonsense="pad")} == {(1, 1, 1, 1)}
    assert min(t for r in wrong(nonsense="vocab") for t in r.tokens) >= SHAPE.vocab
    assert wrong(nonsense="times")[0].token_times_s == right[0].token_times_s[::-1]
    assert [r.id for r in wrong(nonsense="duplicate")] == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert wrong(nonsense="unknown")[0].id == "unknown-r0"


def test_max_batch_is_the_largest_that_survives():
    assert list(loaded(api.OffloadPolicy(gpu_batch_size=2), max_batch=4).generate(requests(2)))
    with pytest.raises(MemoryError):
        list(loaded(api.OffloadPolicy(gpu_batch_size=3, num_gpu_batches=2), max_batch=4).generate(requests(2)))


def test_eaten_memory_is_touched_and_freed():
    """In a process of its own: one that has freed much before would fill the hole and not grow."""
    code = """
import os
from pathlib import Path
from engines.adapters.fake import *
from harness.api import *

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

engine = FakeEngine(eat_bytes=64 << 20)
before = resident()
engine.load(MODEL, OffloadPolicy(), HardwareLimits(), Job(Path("unused"), Path("unused"), 64, 32))
assert resident() - before > 60 << 20
engine.close()
assert resident() - before < 30 << 20
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_fake_and_shapes_needs_no_torch():
    code = (
        "import sys, engines.adapters.fake, engines.models.shapes\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def drained(engine):
    """All events until nothing is pending."""
    events = []
    while engine.pending():
        events += engine.step()
    assert engine.step() == []
    return events


def finished(events):
    return {event.result.id: event.result for event in events if isinstance(event, api.FinishedEvent)}


def test_submitted_requests_share_passes_and_get_the_tokens_they_get_alone():
    engine = loaded(api.OffloadPolicy(gpu_batch_size=2))
    assert isinstance(engine, api.OnlineEngine)
    for request in requests(3):
        engine.submit(request)
    assert engine.pending() == 3
    first = engine.step()
    assert [event.id for event in first] == ["r0", "r1"]
    assert (engine.stats().waiting, engine.stats().running, engine.stats().passes) == (1, 2, 1)
    events = [*first, *drained(engine)]
    results = finished(events)
    assert {id: result.tokens for id, result in results.items()} == {
        result.id: result.tokens for result in loaded().generate(requests(3))
    }
    for id, result in results.items():
        mine = [event for event in events if isinstance(event, api.TokenEvent) and event.id == id]
        assert [(event.token, event.time_s) for event in mine] == list(
            zip(result.tokens, result.token_times_s, strict=True)
        )
    assert engine.clock() == results["r2"].token_times_s[-1] == engine.stats().pass_s


def test_a_cancelled_request_ends_once_and_frees_its_place():
    engine = loaded()
    for request in requests(3):
        engine.submit(request)
    engine.step()
    for id in ("r0", "r1", "r0", "unknown"):
        engine.cancel(id)
    assert engine.pending() == 3, "their last events are still to come"
    events = engine.step()
    assert [(r.id, r.finish_reason, len(r.tokens)) for r in finished(events).values()] == [
        ("r0", "cancelled", 1),
        ("r1", "cancelled", 0),
    ]
    assert [event.id for event in events if isinstance(event, api.TokenEvent)] == ["r2"]
    assert list(finished(drained(engine))) == ["r2"]
    engine.cancel("r2")
    assert engine.step() == []


def test_what_cannot_run_is_refused_and_disturbs_nothing():
    engine = loaded(api.OffloadPolicy(gpu_batch_size=4), longest=64)
    engine.submit(requests(1)[0])
    engine.submit(api.GenerationRequest("empty", ()))
    engine.submit(api.GenerationRequest("long", (1,) * 60, api.SamplingParams(5)))
    engine.submit(api.GenerationRequest("r0", (9,)))
    events = drained(engine)
    refused = [(event.id, event.kind) for event in events if isinstance(event, api.RefusedEvent)]
    assert refused == [("empty", "invalid"), ("long", "infeasible"), ("r0", "invalid")]
    assert finished(events)["r0"].tokens == next(loaded().generate(requests(1))).tokens


def test_a_crash_happens_in_the_step_that_ends_the_first_request():
    engine = loaded(crash="exception")
    engine.submit(requests(1, max_tokens=2)[0])
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
