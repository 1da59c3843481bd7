"""The process inside the sandbox: one LaunchRequest in, one result file out.

`python -m harness.run.worker FOLDER` reads FOLDER/request.json and writes FOLDER/events.jsonl while it runs and
FOLDER/result.json once, by rename, when it is done. What it cannot know (limits, exit status, provenance of the
harness) the launcher adds. The log is this process's stdout and stderr.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import (
    Capabilities,
    Engine,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    HarnessError,
    Job,
    LoadReport,
    LocalModel,
    Measurement,
    Phase,
    Probe,
    RequestTrace,
    RunSpec,
    Score,
    Status,
    UnsupportedError,
    WorkloadSpec,
    from_json,
    to_json,
)
from harness.api.task import Pair, Questions
from harness.common.classify import DISK_FULL, classify
from harness.common.sizes import mean_cached_length
from harness.hardware.provenance import package_versions
from harness.launchers.protocol import EVENTS, EXIT_DISK_FULL, REQUEST, RESULT
from harness.probes.cpu import CpuProbe
from harness.probes.disk import DiskProbe, sequential_read_rates
from harness.probes.energy import EnergyProbe
from harness.probes.gpu import GpuProbe
from harness.probes.latency import metrics, scored_metrics
from harness.probes.memory import MemoryProbe, held_bytes, resident_bytes
from harness.run.accuracy import answers_of, ask, judge, read_questions
from harness.run.answers import check

_EVENT_PERIOD_S = 0.2
#: Pairs that an engine scores at a time.
_SCORED = 1024


class Events:
    """Progress for the launcher: one JSON line each, at most a few a second within a phase."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / EVENTS).open("a", buffering=1)
        self._last = ("", 0.0)

    def emit(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Writes an event when the phase is new, complete, or the last one is old enough."""
        now = time.monotonic()
        if phase == self._last[0] and done < total and now - self._last[1] < _EVENT_PERIOD_S:
            return
        self._last = (phase, now)
        self._file.write(json.dumps({"phase": phase, "done": done, "total": total}) + "\n")


def main(argv: Sequence[str]) -> int:
    """Runs the request in folder argv[0]; returns 0 if a result was written, else EXIT_DISK_FULL."""
    folder = Path(argv[0])
    request = json.loads((folder / REQUEST).read_text())
    _die_with(request["parent"])
    _end_after(request["longest_s"])
    if request["kind"] == "run":
        result = _Run(folder, request).result()
    else:
        result = _help(_HELPERS[request["kind"]], folder, request)
    temporary = folder / (RESULT + ".tmp")
    try:
        temporary.write_text(json.dumps(result, allow_nan=False))
        temporary.rename(folder / RESULT)
    except OSError as exc:
        if exc.errno not in DISK_FULL:
            raise
        return EXIT_DISK_FULL
    return 0


def _end_after(seconds: float) -> None:
    """Asks Linux to end this process by then: of a container whose harness was killed nobody else would."""
    signal.alarm(math.ceil(seconds))


def _die_with(parent: int) -> None:
    """Asks Linux to kill this process when the harness, process `parent`, dies, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _check_device(engine: Engine, spec: RunSpec) -> None:
    if spec.limits.device_memory is not None and not engine.capabilities().device:
        raise UnsupportedError(f"limits.device_memory: engine {spec.engine} uses no device; limit host_memory")


def _idle(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """The footprint of an engine's process that has loaded, run and closed a negligible model.

    So everything that is imported or set up on first use is there, and no weight is.
    """
    spec = from_json(RunSpec, request["spec"])
    engine = registry.make_engine(spec.engine, dict(spec.options))
    _check_device(engine, spec)
    if request["model"] is not None:
        scratch = folder / "scratch"
        scratch.mkdir()
        model = from_json(LocalModel, request["model"])
        policy = replace(spec.policy, gpu_batch_size=1, num_gpu_batches=1)  # the same floor for every batch
        job = Job(scratch, Path(request["cache"]), max_sequence=8, mean_sequence=6)
        limits = HardwareLimits(device_memory=spec.limits.device_memory, threads=spec.limits.threads)
        load = engine.load(model, policy, limits, job)
        tiny = registry.make_workload("synthetic", prompt_len=4, gen_len=4)
        list(engine.generate(tiny.requests(load.vocab, load.block_size, 0)))
        engine.close()
        gc.collect()
    return {"anonymous_bytes": held_bytes(), "file_bytes": resident_bytes()[1]}


def _prepare(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint made ready, outside any limit and any timing."""
    events = Events(folder)
    spec = from_json(RunSpec, request["spec"])
    model = registry.prepare_model(
        spec.engine, spec.model, Path(request["cache"]), lambda done, total: events.emit("prepare", done, total)
    )
    return {"model": to_json(model)}


def _measure_machine(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Disk bandwidth and GEMM rates of this moment; see MachineRates."""
    k, n = request["gemm_shape"]
    disk = sequential_read_rates(Path(request["folder"]))
    if request["gpu"]:
        rates, h2d = registry.device_rates(request["dtypes"], request["rows"], k, n)
        return {"disk_read": disk, "gemm_shape": [k, n], "gemm_flops": rates, "h2d": h2d}
    rates = registry.gemm_rates(request["dtypes"], request["rows"], k, n, request["threads"])
    return {"disk_read": disk, "gemm_shape": [k, n], "gemm_flops": rates}


def _calibrate(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Writes a quick profile of this host into the cache."""
    from harness.hardware import calibration  # not at the top: no launch needs it

    events = Events(folder)
    calibration.calibrate(None, True, Path(request["cache"]), lambda what: events.emit(f"measuring {what}"))
    return {}


def _ask(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Writes an accuracy task's questions for a model."""
    ask(*_task_of(request), partial(Events(folder).emit, "reading the task"))
    return {}


def _judge(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What a launch's answers to them are worth."""
    return {"accuracy": to_json(judge(*_task_of(request), request["answers"]))}


def _task_of(request: dict[str, Any]) -> tuple[RunSpec, LocalModel, Path | None, Path, Path]:
    data = Path(request["data"]) if request["data"] else None
    spec, model = from_json(RunSpec, request["spec"]), from_json(LocalModel, request["model"])
    return spec, model, data, Path(request["cache"]), Path(request["questions"])


_HELPERS: Mapping[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "idle": _idle,
    "prepare": _prepare,
    "machine": _measure_machine,
    "calibrate": _calibrate,
    "ask": _ask,
    "judge": _judge,
}


def _help(task: Callable[[Path, dict[str, Any]], dict[str, Any]], folder: Path, request: dict[str, Any]) -> Any:
    """A helper's findings under `found`, with status and reason as for a run."""
    try:
        return {"status": "ok", "reason": "", "found": task(folder, request)}
    except Exception as exc:
        if not isinstance(exc, HarnessError):
            traceback.print_exc()
        status, reason = classify(exc)
        return {"status": status, "reason": reason}


class _Run:
    """One launch: load, warm up, generate under probes, check, and say how it ended."""

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self._folder = folder
        self._spec = from_json(RunSpec, request["spec"])
        self._gpu = self._spec.limits.device_memory is not None
        self._model = from_json(LocalModel, request["model"])
        self._launched = float(request["launched"])
        self._cache = Path(request["cache"])
        self._questions = Path(request["questions"]) if "questions" in request else None
        self._scored: tuple[int, int, float] | None = None  # pairs, tokens, seconds
        self._events = Events(folder)
        self._measurements: list[Measurement] = []
        self._out: dict[str, Any] = {"status": "error", "reason": "", "metrics": {}, "requests": [], "load": None}

    def result(self) -> dict[str, Any]:
        """Never raises for what the engine did; a kill leaves no result and the launcher classifies it."""
        try:
            self._run()
            self._out["status"] = "ok"
        except KeyboardInterrupt:
            self._fail("interrupted", "interrupted")
        except Exception as exc:
            traceback.print_exc()
            self._fail(*classify(exc))
        self._out["measurements"] = to_json(self._measurements)
        return self._out

    def _fail(self, status: Status, reason: str) -> None:
        self._out |= {"status": status, "reason": reason}

    def _run(self) -> None:
        spec = self._spec
        self._events.emit("startup")
        started = time.time()
        engine = registry.make_engine(spec.engine, dict(spec.options))
        capabilities = engine.capabilities()
        imported = time.time()
        self._out["packages"] = package_versions(capabilities.packages)
        self._out["python"] = platform.python_version()
        self._out["simulated"] = capabilities.simulated
        scratch = self._folder / "scratch"
        scratch.mkdir()
        try:
            asked = None if self._questions is None else read_questions(self._questions)
            load = self._load(engine, scratch, asked)
            traces = self._work(engine, load, capabilities, asked)
            own = engine.trace()
        finally:
            engine.close()
        self._out["requests"] = to_json(traces)
        self._out["trace"] = to_json(own.events)
        generated = metrics(traces, capabilities.phased) if traces else {}
        padding = own.metrics.get("scored_padding_tokens", 0.0)
        self._out["metrics"] = (
            (scored_metrics(*self._scored, padding) if self._scored else {})
            | generated
            | {
                **own.metrics,
                "launch_s": started - self._launched,
                "import_s": imported - started,
            }
        )

    def _load(self, engine: Engine, scratch: Path, asked: Questions | None) -> LoadReport:
        self._events.emit("load")
        spec = self._spec
        _check_device(engine, spec)
        job = Job(
            scratch,
            self._cache,
            max_sequence=asked.max_sequence if asked else spec.workload.prompt_len + spec.workload.gen_len,
            mean_sequence=asked.mean_sequence if asked else _mean_cached(spec.workload),
            on_progress=lambda done, total: self._events.emit("load", done, total),
        )
        with _Probed(self._measurements, "load", self._gpu):
            load = engine.load(self._model, spec.policy, spec.limits, job)
        self._out["load"] = to_json(load)
        return load

    def _work(
        self, engine: Engine, load: LoadReport, capabilities: Capabilities, asked: Questions | None
    ) -> list[RequestTrace]:
        spec = self._spec.workload
        requests = asked.prompts if asked else _requests(self._spec, load)
        for round_ in range(self._spec.warmup):
            # One short request per warm-up: touches every layer once, reads every weight once.
            self._events.emit("warmup", round_, self._spec.warmup)
            short = registry.make_workload("synthetic", prompt_len=min(8, spec.prompt_len), gen_len=1)
            list(engine.generate(short.requests(load.vocab, 1, self._spec.seed + 1 + round_)))
        results: list[GenerationResult] = []
        scores: list[Score] = []
        with _Probed(self._measurements, "generate", self._gpu):
            began = time.perf_counter()
            if requests:
                self._generate(engine, requests, results)
            elapsed = time.perf_counter() - began
            if asked and asked.pairs:
                self._score(engine, asked.pairs, scores)
        traces = check(requests, results, load.vocab, None if capabilities.simulated else elapsed)
        if asked:
            self._out["answers"] = answers_of(requests, results, scores)
        return traces

    def _generate(self, engine: Engine, requests: Sequence[GenerationRequest], results: list[GenerationResult]) -> None:
        done, total = 0, sum(r.sampling.max_tokens for r in requests)
        self._events.emit("generate", 0, total)
        for result in engine.generate(requests):
            results.append(result)
            done += len(result.tokens)
            self._events.emit("generate", done, total)

    def _score(self, engine: Engine, pairs: Sequence[Pair], scores: list[Score]) -> None:
        """In pieces that are large enough to be packed well, so that there is progress to show; the longest first, so
        that an engine which pads has what is of a length together."""
        began = time.perf_counter()
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]) - len(pairs[i][1]), pairs[i]))
        found: dict[int, Score] = {}
        for start in range(0, len(order), _SCORED):
            self._events.emit("score", start, len(pairs))
            piece = order[start : start + _SCORED]
            found |= zip(piece, engine.score([pairs[i] for i in piece]), strict=True)
        scores += [found[i] for i in range(len(pairs))]
        self._scored = (len(pairs), sum(len(context) + len(more) for context, more in pairs),
                        time.perf_counter() - began)  # fmt: skip


def _requests(spec: RunSpec, load: LoadReport) -> list[GenerationRequest]:
    """Of a workload whose lengths the cell names: as many as are asked for, or what makes a steady state."""
    job, wanted = spec.workload, spec.workload.num_requests
    if job.prompt_len + job.gen_len > load.max_context:
        raise HarnessError(
            f"prompt {job.prompt_len} + {job.gen_len} new tokens exceed the model's context of {load.max_context}"
        )
    count = load.block_size * load.steady_blocks if wanted == "auto" else wanted
    return registry.workload(job).requests(load.vocab, count, spec.seed)


def _mean_cached(spec: WorkloadSpec) -> int:
    return mean_cached_length(registry.lengths(spec) or [(spec.prompt_len, spec.gen_len)])


class _Probed:
    """All probes around one phase, of the device too for a cell that has one."""

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
