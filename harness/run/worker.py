"""The process inside the sandbox: it reads one request and writes one result file.

`python -m harness.run.worker FOLDER` reads FOLDER/request.json, appends to FOLDER/events.jsonl while it runs and
writes FOLDER/result.json at the end, by rename. The launcher adds what the worker cannot know: limits, exit status,
provenance of the harness. The log is this process's stdout and stderr.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import (
    AskTask,
    CalibrateHost,
    Capabilities,
    CellResult,
    Engine,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    HarnessError,
    Job,
    JudgeTask,
    LoadReport,
    MachineRates,
    MeasureIdle,
    MeasureMachine,
    Measurement,
    Phase,
    PrepareModel,
    Probe,
    Refusal,
    RequestTrace,
    RunCell,
    RunSpec,
    Score,
    UnsupportedError,
    Work,
    WorkerResult,
    WorkloadSpec,
    from_json,
    to_json,
)
from harness.api.task import Pair, Questions
from harness.common.classify import DISK_FULL, classify
from harness.common.sizes import mean_cached_length
from harness.hardware.provenance import package_versions
from harness.launchers.protocol import EVENTS, EXIT_DISK_FULL, REQUEST, RESULT, WORK
from harness.probes.counters import CpuProbe, DiskProbe, EnergyProbe
from harness.probes.disk import sequential_read_rates
from harness.probes.gpu import GpuProbe
from harness.probes.latency import metrics, scored_metrics
from harness.probes.memory import MemoryProbe, held_bytes
from harness.run.accuracy import answers_of, ask, judge, read_questions
from harness.run.answers import check

_EVENT_PERIOD_S = 0.2
#: Pairs per call of an engine's `score`.
_PAIRS_PER_CALL = 1024


class Events:
    """Progress events for the launcher, one JSON line each, at most a few per second within a phase."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / EVENTS).open("a", buffering=1)
        self._last = ("", 0.0)

    def emit(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Writes an event if the phase is new or complete, or the last event is old enough."""
        now = time.monotonic()
        if phase == self._last[0] and done < total and now - self._last[1] < _EVENT_PERIOD_S:
            return
        self._last = (phase, now)
        self._file.write(json.dumps({"phase": phase, "done": done, "total": total}) + "\n")


def main(argv: Sequence[str]) -> int:
    """Does the work in folder argv[0]. Returns 0 if it wrote a result, else EXIT_DISK_FULL."""
    folder = Path(argv[0])
    request = json.loads((folder / REQUEST).read_text())
    _die_with(request["parent"])
    _end_after(request["longest_s"])
    result = _done(folder, request["kind"], request["work"])
    temporary = folder / (RESULT + ".tmp")
    try:
        temporary.write_text(json.dumps(to_json(result), allow_nan=False))
        temporary.rename(folder / RESULT)
    except OSError as exc:
        if exc.errno not in DISK_FULL:
            raise
        return EXIT_DISK_FULL
    return 0


def _end_after(seconds: float) -> None:
    """Asks Linux to end this process after `seconds`: nothing else ends a container whose harness was killed."""
    signal.alarm(math.ceil(seconds))


def _die_with(parent: int) -> None:
    """Asks Linux to kill this process when the harness, process `parent`, dies, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the harness died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _check_device(engine: Engine, spec: RunSpec) -> None:
    if spec.limits.device_memory is not None and not engine.capabilities().device:
        raise UnsupportedError(f"limits.device_memory: engine {spec.engine} uses no device; limit host_memory")


def _idle(folder: Path, work: MeasureIdle) -> int:
    """Bytes held by an engine's process after it has loaded, run and closed a negligible model.

    By then memory holds everything that is imported or set up on first use, but no weights.
    """
    spec = work.spec
    engine = registry.make_engine(spec.engine, spec.options)
    _check_device(engine, spec)
    if work.model is not None:
        scratch = folder / "scratch"
        scratch.mkdir()
        policy = replace(spec.policy, gpu_batch_size=1, num_gpu_batches=1)  # the footprint must not depend on it
        job = Job(scratch, work.cache, max_sequence=8, mean_sequence=6)
        limits = HardwareLimits(device_memory=spec.limits.device_memory, threads=spec.limits.threads)
        load = engine.load(work.model, policy, limits, job)
        tiny = registry.workload(WorkloadSpec(prompt_len=4, gen_len=4))
        list(engine.generate(tiny.requests(load.vocab, load.block_size, 0)))
        engine.close()
        gc.collect()
    return held_bytes()


def _measure_machine(work: MeasureMachine) -> MachineRates:
    """Measures disk bandwidth and GEMM rates now."""
    disk, (k, n) = tuple(sequential_read_rates(work.folder)), work.gemm_shape
    rates, h2d = registry.machine_rates(), tuple[float, ...]()
    if work.gpu:
        flops, copies = rates.device_rates(work.dtypes, work.rows, k, n)
        h2d = tuple(copies)
    else:
        flops = rates.gemm_rates(work.dtypes, work.rows, k, n, work.threads)
    samples = {dtype: {rows: tuple(each) for rows, each in curve.items()} for dtype, curve in flops.items()}
    return MachineRates(disk, work.gemm_shape, samples, h2d=h2d)


def _calibrate(events: Events, cache: Path) -> None:
    """Writes a quick profile of this host into the cache."""
    from harness.hardware import calibration  # imported here because no launch needs it

    calibration.calibrate(None, True, cache, lambda what: events.emit(f"measuring {what}"))


def _done(folder: Path, kind: str, body: object) -> WorkerResult:
    """Does the work given as JSON; the result holds status and reason if the work ended in an error."""
    try:
        work = from_json(WORK[kind], body)
        return (
            _Run(folder, work).result() if isinstance(work, RunCell) else WorkerResult("ok", value=_help(folder, work))
        )
    except Exception as exc:
        if not isinstance(exc, HarnessError):
            traceback.print_exc()
        refusal = classify(exc)
        return WorkerResult(refusal.status, refusal.reason)


def _help(folder: Path, work: Work) -> object:
    """Does a helper's work and returns its value; see harness.api.launcher."""
    match work:
        case MeasureIdle():
            return _idle(folder, work)
        case PrepareModel():
            show = partial(Events(folder).emit, "prepare")
            return registry.prepare_model(work.engine, work.model, work.cache, show)
        case MeasureMachine():
            return _measure_machine(work)
        case CalibrateHost():
            _calibrate(Events(folder), work.cache)
        case AskTask():
            ask(work, partial(Events(folder).emit, "reading the task"))
        case JudgeTask():
            return judge(work)
    return None


class _Run:
    """One launch: load, warm up, generate under probes, check, and report how it ended."""

    def __init__(self, folder: Path, work: RunCell) -> None:
        self._folder = folder
        self._work = work
        self._spec = work.spec
        self._gpu = work.spec.limits.device_memory is not None
        self._scored: tuple[int, int, float] | None = None  # pairs, tokens, seconds
        self._events = Events(folder)
        self._measurements: list[Measurement] = []
        self._measured = CellResult()

    def result(self) -> WorkerResult:
        """Never raises for an engine's failure. A killed worker leaves no result, and the launcher classifies that."""
        refusal = None
        try:
            self._run()
        except KeyboardInterrupt:
            refusal = Refusal("interrupted", "interrupted")
        except Exception as exc:
            traceback.print_exc()
            refusal = classify(exc)
        measured = replace(self._measured, measurements=tuple(self._measurements))
        return WorkerResult(refusal.status, refusal.reason, measured) if refusal else WorkerResult("ok", value=measured)

    def _note(self, **measured: Any) -> None:
        """Adds to the measured result, which a later failure does not lose."""
        self._measured = replace(self._measured, **measured)

    def _run(self) -> None:
        spec = self._spec
        self._events.emit("startup")
        started = time.time()
        engine = registry.make_engine(spec.engine, spec.options)
        capabilities = engine.capabilities()
        imported = time.time()
        self._note(
            packages=package_versions(capabilities.packages),
            python=platform.python_version(),
            simulated=capabilities.simulated,
        )
        scratch = self._folder / "scratch"
        scratch.mkdir()
        with closing(engine):
            questions = None if self._work.questions is None else read_questions(self._work.questions)
            load = self._load(engine, scratch, questions)
            traces = self._generate_and_score(engine, load, capabilities, questions)
            engine_trace = engine.trace()
        generated = metrics(traces, capabilities.phased) if traces else {}
        padding = engine_trace.metrics.get("scored_padding_tokens", 0.0)
        scored = scored_metrics(*self._scored, padding) if self._scored else {}
        times = {"launch_s": started - self._work.launched, "import_s": imported - started}
        self._note(
            requests=tuple(traces),
            trace=engine_trace.events,
            metrics=scored | generated | dict(engine_trace.metrics) | times,
        )

    def _load(self, engine: Engine, scratch: Path, questions: Questions | None) -> LoadReport:
        self._events.emit("load")
        spec = self._spec
        _check_device(engine, spec)
        job = Job(
            scratch,
            self._work.cache,
            max_sequence=questions.max_sequence if questions else spec.workload.prompt_len + spec.workload.gen_len,
            mean_sequence=questions.mean_sequence if questions else _mean_cached(spec.workload),
            on_progress=partial(self._events.emit, "load"),
        )
        with _Probed(self._measurements, "load", self._gpu):
            load = engine.load(self._work.model, spec.policy, spec.limits, job)
        self._note(load=load)
        return load

    def _generate_and_score(
        self, engine: Engine, load: LoadReport, capabilities: Capabilities, questions: Questions | None
    ) -> list[RequestTrace]:
        spec = self._spec.workload
        requests = questions.prompts if questions else _requests(self._spec, load)
        for round_ in range(self._spec.warmup):
            # One short request per warm-up runs every layer and reads every weight once.
            self._events.emit("warmup", round_, self._spec.warmup)
            short = registry.workload(WorkloadSpec(prompt_len=min(8, spec.prompt_len), gen_len=1))
            list(engine.generate(short.requests(load.vocab, 1, self._spec.seed + 1 + round_)))
        results: list[GenerationResult] = []
        scores: list[Score] = []
        with _Probed(self._measurements, "generate", self._gpu):
            began = time.perf_counter()
            if requests:
                self._generate(engine, requests, results)
            elapsed = time.perf_counter() - began
            if questions and questions.pairs:
                self._score(engine, questions.pairs, scores)
        traces = check(requests, results, load.vocab, None if capabilities.simulated else elapsed)
        if questions:
            self._note(answers=answers_of(requests, results, scores))
        return traces

    def _generate(self, engine: Engine, requests: Sequence[GenerationRequest], results: list[GenerationResult]) -> None:
        done, total = 0, sum(r.sampling.max_tokens for r in requests)
        self._events.emit("generate", 0, total)
        for result in engine.generate(requests):
            results.append(result)
            done += len(result.tokens)
            self._events.emit("generate", done, total)

    def _score(self, engine: Engine, pairs: Sequence[Pair], scores: list[Score]) -> None:
        """Scores pairs in groups, large enough to pack well and small enough to show progress. Longest first, so that
        an engine that pads gets pairs of similar length together."""
        began = time.perf_counter()
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]) - len(pairs[i][1]), pairs[i]))
        by_index: dict[int, Score] = {}
        for start in range(0, len(order), _PAIRS_PER_CALL):
            self._events.emit("score", start, len(pairs))
            piece = order[start : start + _PAIRS_PER_CALL]
            by_index |= zip(piece, engine.score([pairs[i] for i in piece]), strict=True)
        scores += [by_index[i] for i in range(len(pairs))]
        self._scored = (len(pairs), sum(len(context) + len(more) for context, more in pairs),
                        time.perf_counter() - began)  # fmt: skip


def _requests(spec: RunSpec, load: LoadReport) -> list[GenerationRequest]:
    """The requests of a workload: the cell's `num_requests`, or as many as a steady state takes with `auto`."""
    workload = spec.workload
    prompt, generated = workload.prompt_len, workload.gen_len
    if prompt + generated > load.max_context:
        raise HarnessError(f"prompt {prompt} + {generated} new tokens exceed the model's context of {load.max_context}")
    count = load.block_size * load.steady_blocks if workload.num_requests == "auto" else workload.num_requests
    return registry.workload(workload).requests(load.vocab, count, spec.seed)


def _mean_cached(spec: WorkloadSpec) -> int:
    return mean_cached_length(registry.lengths(spec) or [(spec.prompt_len, spec.gen_len)])


class _Probed:
    """Runs all probes around one phase; the device's only with `gpu`."""

    def __init__(self, sink: list[Measurement], phase: Phase, gpu: bool) -> None:
        self._sink = sink
        self._phase = phase
        self._probes: list[Probe] = [EnergyProbe(), CpuProbe(), DiskProbe(), MemoryProbe()]
        self._probes += [GpuProbe()] if gpu else []

    def __enter__(self) -> None:
        for probe in self._probes:
            probe.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        elapsed = time.perf_counter() - self._start
        self._sink.append(Measurement("wall_s", "s", (elapsed,), self._phase))
        for probe in reversed(self._probes):
            probe.__exit__(*exc)
            self._sink.extend(probe.measurements(self._phase))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
