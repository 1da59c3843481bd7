"""The process inside the sandbox: it reads one request and writes one result file.

`python -m harness.run.worker FOLDER` reads FOLDER/request.json, appends to FOLDER/events.jsonl while it runs and
writes FOLDER/result.json at the end, by rename. The launcher adds what the worker cannot know: limits, exit status,
provenance of the harness. The log is this process's stdout and stderr.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import api, registry
from harness.api.machine import mean_cached_length, mean_generated
from harness.api.task import Questions
from harness.common.classify import DISK_FULL, classify
from harness.common.disk_rate import sequential_read_rates
from harness.common.files import replace_with
from harness.common.garbage import leave_what_exists
from harness.common.locks import waits
from harness.common.serving_figures import answered
from harness.hardware.provenance import package_versions
from harness.launchers.protocol import EVENTS, EXIT_DISK_FULL, REQUEST, RESULT, WORK
from harness.probes.counters import CpuProbe, DiskProbe
from harness.probes.energy import EnergyProbe
from harness.probes.gpu import GpuProbe
from harness.probes.latency import metrics, scored_metrics
from harness.probes.memory import MemoryProbe, held_bytes
from harness.run.accuracy import answers_of, ask, judge, read_questions
from harness.run.answers import check, generate, score
from harness.run.online import OnlineRun, metrics_of, notes_of, sequence_lengths

_EVENT_PERIOD_S = 0.2
#: Rows at which GEMM rates are taken: from one sequence's decode to a large prefill.
_PROBED_ROWS = (1, 4, 16, 64, 256, 1024)


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
    _end_with(request["parent"], request["longest_s"])
    waits.set(Events(folder).emit)  # who started this process reads no log meanwhile
    result = _done(folder, request["kind"], request["work"])
    try:
        replace_with(folder / RESULT, json.dumps(api.to_json(result), allow_nan=False))
    except OSError as exc:
        if exc.errno not in DISK_FULL:
            raise
        return EXIT_DISK_FULL
    return 0


def _end_with(parent: int, longest_s: float) -> None:
    """Asks Linux to kill this process when the harness, process `parent`, dies, even by kill -9, and to end it after
    `longest_s` seconds: nothing else ends a container whose harness was killed."""
    signal.alarm(math.ceil(longest_s))
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the harness died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _idle(folder: Path, work: api.MeasureIdle) -> int:
    """Bytes held by an engine's process after it has loaded, run and closed a negligible model.

    By then memory holds everything that is imported or set up on first use, but no weights.
    """
    spec = work.spec
    engine = registry.make_engine(spec.engine, spec.options)
    engine.capabilities().require_device(spec)
    if work.model is not None and not engine.capabilities().remote:  # a server's idle memory is its own
        scratch = folder / "scratch"
        scratch.mkdir()
        policy = replace(
            spec.policy, gpu_batch_size=1, num_gpu_batches=1, pipeline=1, tensor=1
        )  # the footprint must not depend on it
        job = api.Job(scratch, work.cache, max_sequence=8, mean_sequence=6)
        limits = api.HardwareLimits(device_memory=spec.limits.device_memory, threads=spec.limits.threads)
        load = engine.load(work.model, policy, limits, job)
        tiny = registry.workload(api.WorkloadSpec(prompt_len=4, gen_len=4))
        list(engine.generate(tiny.requests(load.vocab, load.block_size, 0)))
        engine.close()
        gc.collect()
    return held_bytes()


def _measure_machine(work: api.MeasureMachine) -> api.MachineRates:
    """Measures disk bandwidth and GEMM rates now."""
    disk, rates = tuple(sequential_read_rates(work.folder)), registry.machine_rates()
    copies: Sequence[float] = ()
    if work.gpu:
        flops, copies = rates.device_rates(work.dtypes, _PROBED_ROWS, *work.gemm_shape)
    else:
        flops = rates.gemm_rates(work.dtypes, _PROBED_ROWS, *work.gemm_shape, work.threads)
    samples = {dtype: {rows: tuple(each) for rows, each in curve.items()} for dtype, curve in flops.items()}
    return api.MachineRates(disk, work.gemm_shape, samples, h2d=tuple(copies))


def _done(folder: Path, kind: str, body: object) -> api.WorkerResult:
    """Does the work given as JSON; the result holds status and reason if the work ended in an error."""
    try:
        work = api.from_json(WORK[kind], body)
        if isinstance(work, api.RunCell):
            return _Run(folder, work).result()
        return api.WorkerResult("ok", value=_help(folder, work))
    except Exception as exc:
        if not isinstance(exc, api.HarnessError):
            traceback.print_exc()
        refusal = classify(exc)
        return api.WorkerResult(refusal.status, refusal.reason)


def _help(folder: Path, work: api.Work) -> object:
    """Does a helper's work and returns its value; see harness.api.launcher."""
    match work:
        case api.MeasureIdle():
            return _idle(folder, work)
        case api.PrepareModel():
            show = partial(Events(folder).emit, "prepare")
            return registry.prepare_model(work.engine, work.model, work.cache, show)
        case api.MeasureMachine():
            return _measure_machine(work)
        case api.CalibrateHost():
            from harness.hardware import calibration  # imported here because no launch needs it

            events = Events(folder)
            calibration.calibrate(None, True, work.cache, lambda what: events.emit(f"measuring {what}"))
        case api.AskTask():
            ask(work, partial(Events(folder).emit, "reading the task"))
        case api.JudgeTask():
            return judge(work)
    return None


class _Run:
    """One launch: load, warm up, generate and score under probes, check, and report how it ended."""

    def __init__(self, folder: Path, work: api.RunCell) -> None:
        self._folder = folder
        self._work = work
        self._spec = work.spec
        self._events = Events(folder)
        self._measurements: list[api.Measurement] = []
        self._measured = api.CellResult()

    def result(self) -> api.WorkerResult:
        """Never raises for an engine's failure. A killed worker leaves no result, and the launcher classifies that."""
        refusal = None
        try:
            self._run()
        except KeyboardInterrupt:
            refusal = api.Refusal("interrupted", "interrupted")
        except Exception as exc:
            traceback.print_exc()
            refusal = classify(exc)
        measured = replace(self._measured, measurements=tuple(self._measurements))
        return (
            api.WorkerResult(refusal.status, refusal.reason, measured)
            if refusal
            else api.WorkerResult("ok", value=measured)
        )

    def _note(self, **measured: Any) -> None:
        """Adds to the measured result, which a later failure does not lose."""
        self._measured = replace(self._measured, **measured)

    def _run(self) -> None:
        spec = self._spec
        self._events.emit("startup")
        started = time.monotonic()
        engine = registry.make_engine(spec.engine, spec.options)
        capabilities = engine.capabilities()
        times = {"launch_s": started - self._work.launched, "import_s": time.monotonic() - started}
        self._note(
            packages=package_versions(capabilities.packages),
            python=platform.python_version(),
            simulated=capabilities.simulated,
        )
        with closing(engine):
            if capabilities.remote and not spec.workload.online:
                raise api.UnsupportedError(
                    f"engine {spec.engine} tells no token ids: give it a workload of kind arrivals or conversation"
                )
            questions = None if self._work.questions is None else read_questions(self._work.questions)
            load = self._load(engine, capabilities, questions)
            self._warm_up(engine, load)
            leave_what_exists()
            if self._spec.workload.online:
                self._serve(engine, capabilities, load, times)
                return
            requests, pairs = (questions.prompts, questions.pairs) if questions else (_requests(spec, load), ())
            with self._probed("generate"):
                began = time.perf_counter()
                results = generate(engine, requests, self._events.emit) if requests else []
                generated = time.perf_counter()
                scores = score(engine, pairs, self._events.emit)
                scored = time.perf_counter()
            traces = check(requests, results, load.vocab, None if capabilities.simulated else generated - began)
            if questions:
                self._note(answers=answers_of(requests, results, scores))
            trace = engine.trace()
        figures = metrics(traces, capabilities.phased) if traces else {}
        if pairs:
            tokens = sum(len(context) + len(continuation) for context, continuation in pairs)
            padding = trace.metrics.get("scored_padding_tokens", 0.0)
            figures = scored_metrics(len(pairs), tokens, scored - generated, padding) | figures
        self._note(requests=tuple(traces), trace=trace.events, metrics=figures | dict(trace.metrics) | times)

    def _serve(
        self, engine: api.Engine, capabilities: api.Capabilities, load: api.LoadReport, times: dict[str, float]
    ) -> None:
        """Requests that arrive while the engine runs."""
        workload = self._spec.workload
        with self._probed("generate"):
            served = OnlineRun(self._spec, engine, capabilities, load, self._events.emit).run()
        trace = engine.trace()
        self._note(served=served, trace=trace.events, notes=notes_of(served))
        self._note(metrics=metrics_of(served, workload.slo, workload.rate == "sweep") | dict(trace.metrics) | times)
        if not any(answered(rate) for rate in served):
            refused = next((r.reason for rate in served for r in rate.requests if r.reason), "none arrived in time")
            raise api.HarnessError(f"no request was answered: {refused}")

    def _load(self, engine: api.Engine, capabilities: api.Capabilities, questions: Questions | None) -> api.LoadReport:
        self._events.emit("load")
        spec = self._spec
        capabilities.require_device(spec)
        scratch = self._folder / "scratch"
        scratch.mkdir()
        if questions:
            longest, mean, new = questions.max_sequence, questions.mean_sequence, questions.mean_new
        elif spec.workload.online:
            longest, mean, new = sequence_lengths(spec)
        else:
            own = (spec.workload.prompt_len, spec.workload.gen_len)
            lengths = registry.lengths(spec.workload) or [own]
            longest, mean, new = sum(own), mean_cached_length(lengths), mean_generated(lengths)
        report = partial(self._events.emit, "load")
        job = api.Job(scratch, self._work.cache, longest, mean, report, mean_new=new)
        with self._probed("load"):
            load = engine.load(self._work.model, spec.policy, spec.limits, job)
        self._note(load=load)
        return load

    def _warm_up(self, engine: api.Engine, load: api.LoadReport) -> None:
        """Runs every layer and reads every weight once, by one short request per warm-up."""
        spec = self._spec
        short = registry.workload(api.WorkloadSpec(prompt_len=min(8, spec.workload.prompt_len), gen_len=1))
        for round_ in range(spec.warmup):
            self._events.emit("warmup", round_, spec.warmup)
            list(engine.generate(short.requests(load.vocab, 1, spec.seed + 1 + round_)))

    @contextmanager
    def _probed(self, phase: api.Phase) -> Iterator[None]:
        """Runs all probes around one phase; the device's only where the cell uses one."""
        probes: list[api.Probe] = [EnergyProbe(), CpuProbe(), DiskProbe(), MemoryProbe()]
        probes += [GpuProbe()] if self._spec.limits.gpu else []
        with ExitStack() as running:
            for probe in probes:
                running.callback(lambda ended: self._measurements.extend(ended.measurements(phase)), probe)
                running.enter_context(probe)
            start = time.perf_counter()
            running.callback(
                lambda: self._measurements.append(api.Measurement("wall_s", "s", (time.perf_counter() - start,), phase))
            )
            yield


def _requests(spec: api.RunSpec, load: api.LoadReport) -> list[api.GenerationRequest]:
    """The requests of a workload: the cell's `num_requests`, or as many as a steady state takes with `auto`."""
    workload = spec.workload
    prompt, generated = workload.prompt_len, workload.gen_len
    if prompt + generated > load.max_context:
        raise api.HarnessError(
            f"prompt {prompt} + {generated} new tokens exceed the model's context of {load.max_context}"
        )
    count = load.block_size * load.steady_blocks if workload.num_requests == "auto" else workload.num_requests
    return registry.workload(workload).requests(load.vocab, count, spec.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
