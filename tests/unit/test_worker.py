"""The worker refuses answers that did not do the work, and names failures by their evidence."""

import dataclasses
import errno
import json
import os
from unittest.mock import Mock

import pytest

from harness import api
from harness.common.classify import classify
from harness.launchers.launcher import judge
from harness.launchers.protocol import EXIT_DISK_FULL
from harness.run import worker
from harness.run.answers import check
from suites.workloads import Synthetic

REQUESTS = [
    api.GenerationRequest(f"r{i}", (7, 8, 9), api.SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(2)
]
RESULTS = [api.GenerationResult(r.id, (1, 2), 0.0, (0.5, 1.0), 3) for r in REQUESTS]


def test_honest_answers_become_traces_in_the_order_asked():
    traces = check(REQUESTS, RESULTS[::-1], vocab=10)
    assert [t.id for t in traces] == ["r0", "r1"]
    assert traces[0].digest == traces[1].digest  # same prompt, same tokens
    other = dataclasses.replace(RESULTS[0], tokens=(1, 3))
    assert check(REQUESTS, [other, RESULTS[1]], 10)[0].digest != traces[0].digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "r0 was not answered"),
        ({"tokens": (1,), "token_times_s": (0.5,)}, "1 tokens instead of 2"),
        ({"tokens": (1, 2, 3), "token_times_s": (0.5, 1.0, 1.5)}, "3 tokens"),
        ({"tokens": (1, 10)}, "outside the vocabulary"),
        ({"token_times_s": (0.5,)}, "1 times for 2 tokens"),
        ({"token_times_s": (1.0, 0.5)}, "run backwards"),
        ({"start_s": 0.7}, "run backwards"),
        ({"prompt_tokens": 4}, "attended to 4 prompt tokens instead of 3"),
        ({"padding_tokens": -1}, "negative padding"),
        ({"id": "r9"}, "never asked for"),
        ({"id": "r1"}, "answered twice"),
    ],
)
def test_dishonest_answers_are_refused(change, words):
    first = [] if change is None else [dataclasses.replace(RESULTS[0], **change)]
    with pytest.raises(api.HarnessError, match=words):
        check(REQUESTS, [*first, RESULTS[1]], vocab=10)


def test_times_that_the_clock_does_not_bear_out_are_refused():
    assert check(REQUESTS, RESULTS, 10, elapsed_s=1.2)
    for elapsed in (0.5, 60.0):
        with pytest.raises(api.HarnessError, match=r"end at 1.00 s, but the work took"):
            check(REQUESTS, RESULTS, 10, elapsed_s=elapsed)


def test_no_room_for_the_result_is_told_by_the_exit_code(tmp_path, monkeypatch):
    request = {"kind": "PrepareModel", "work": {}, "parent": os.getppid(), "longest_s": 60}
    (tmp_path / worker.REQUEST).write_text(json.dumps(request))
    monkeypatch.setattr(worker, "_end_with", lambda parent, longest_s: None)
    monkeypatch.setattr(worker, "_done", lambda *_: api.WorkerResult("ok"))

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    assert worker.main([str(tmp_path)]) == EXIT_DISK_FULL
    assert {path.name for path in tmp_path.iterdir()} == {worker.REQUEST, worker.EVENTS}, "no half result"


class OutOfMemoryError(RuntimeError):
    """What torch raises on a device is recognised by its name, for the harness does not import torch."""


def wrapped(inner):
    outer = RuntimeError("library error")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (api.InfeasibleError("x"), "infeasible"),
        (api.UnsupportedError("x"), "unsupported"),
        (api.DiskFullError("x"), "disk_full"),
        (api.HarnessError("x"), "error"),
        (OutOfMemoryError("CUDA out of memory"), "oom_device"),
        (MemoryError(), "oom_host"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), "oom_host"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (wrapped(OSError(errno.ENOSPC, "No space left on device")), "disk_full"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "disk_full"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom_host"),
        (OSError(errno.ENOENT, "no such file"), "error"),
        (ValueError("several\nlines"), "error"),
    ],
)
def test_exceptions_have_a_status_and_one_line(exc, status):
    refusal = classify(exc)
    assert refusal.status == status
    assert "\n" not in refusal.reason


def outcome(**changes):
    base = api.Outcome(api.WorkerResult("ok"), 0, False, 0, 1, "cgroup-v1", True, "(none)")
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (outcome(), "ok", ""),
        (outcome(result=None, exit_code=-9, oom_kills=1), "oom_host", "at its limit of 1 MiB"),
        (outcome(result=api.WorkerResult("error", "child died"), oom_kills=1), "oom_host", "OOM"),
        (outcome(oom_kills=1), "ok", ""),  # a helper of the engine died and the engine coped
        (outcome(result=None, exit_code=-9), "error", "SIGKILL"),  # exit 137 alone is no evidence of memory
        (outcome(result=None, exit_code=-9, timed_out=True), "timeout", "after 5 s"),
        (outcome(result=None, exit_code=3), "error", "exited with 3"),
        (outcome(result=None, exit_code=-42), "error", "worker exited with -42; last log lines: (none)"),  # no signal's
        (outcome(result=None, exit_code=EXIT_DISK_FULL), "disk_full", "no space left"),
    ],
)
def test_the_launcher_judges_from_evidence(ended, status, words):
    refusal = judge(ended, 5.0, 1 << 20)
    assert (refusal.status if refusal else "ok") == status
    assert words in (refusal.reason if refusal else "")


def test_synthetic_requests_do_not_depend_on_how_many_are_asked_for():
    workload = Synthetic(prompt_len=5, gen_len=3)
    few, many = workload.requests(100, 3, seed=1), workload.requests(100, 9, seed=1)
    assert few == many[:3] != workload.requests(100, 3, seed=2)
    assert len({r.prompt for r in many}) == 9
    assert all(5 <= t < 100 for r in many for t in r.prompt)
    assert {len(r.prompt) for r in many} == {5}


def test_answers_that_may_end_early_are_neither_empty_nor_longer_than_asked():
    request = api.GenerationRequest("r0", (7, 8, 9), api.SamplingParams(max_tokens=2))
    assert check([request], [api.GenerationResult("r0", (1,), 0.0, (0.5,), 3)], 10)[0].generated_tokens == 1
    for tokens, words in (((), "no token"), ((1, 2, 3), "3 tokens, more than 2")):
        result = api.GenerationResult("r0", tokens, 0.0, (0.5,) * len(tokens), 3)
        with pytest.raises(api.HarnessError, match=words):
            check([request], [result], 10)
