"""Launches cells, each in a fresh sandbox of the kind it asks for, and judges them from evidence."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness import registry
from harness.api import (
    Accuracy,
    EventSink,
    HarnessError,
    Isolation,
    LaunchRequest,
    LocalModel,
    MachineRates,
    MemoryLimit,
    ModelSpec,
    RunRecord,
    RunSpec,
    Status,
    UnsupportedError,
    from_json,
    to_json,
)
from harness.hardware import provenance
from harness.launchers import images
from harness.launchers.kept import KeptAnswers
from harness.launchers.memory import sweep_stale_groups
from harness.launchers.process import Processes, ProcessSandbox
from harness.launchers.protocol import EXIT_DISK_FULL
from harness.launchers.sandbox import Outcome, Sandbox, Sandboxes, Task, ignore_events, settings
from harness.launchers.venv import VirtualEnvironments

_HELPER_TIMEOUT_S = 600.0
_PREPARE_TIMEOUT_S = 24 * 3600.0


class CellLauncher:
    """Launches cells. `places` maps folders to the names they have in records.

    Only the engine runs in the cell's own sandbox; what surrounds a launch (models, probes of the machine, questions
    of tasks and what answers are worth) is done by processes of this interpreter.
    """

    def __init__(self, cache: Path, places: Mapping[str, str]) -> None:
        self._cache = cache
        self._places = places
        self._idle: dict[str, int] = {}
        self._helper = ProcessSandbox()
        self._sandboxes: dict[Isolation, Sandboxes] = {}
        self._sandbox: dict[str, Sandbox] = {}
        sweep_stale_groups()

    def ready(self, kinds: Iterable[Isolation]) -> None:
        """Makes sure that cells of these kinds can be launched at all. Raises HarnessError with the remedy."""
        for kind in kinds:
            self._sandboxes[kind] = self._made(kind)

    def _made(self, kind: Isolation) -> Sandboxes:
        if kind == "docker":
            images.require_sdk()
            from harness.launchers.docker import Containers  # not at the top: the SDK may not be installed

            return Containers(self._cache)
        return Processes() if kind == "process" else VirtualEnvironments(self._cache)

    def environment(self, spec: RunSpec, log: Path, on_event: EventSink) -> Mapping[str, str] | tuple[Status, str]:
        """What identifies the packages that a cell's engine runs with, or why it has none."""
        try:
            identity = self._of(spec, log, on_event).identity()
        except HarnessError as exc:
            return _refusal(exc), self.scrub(str(exc))
        versions = identity or provenance.package_versions(registry.engine_entry(spec.engine).requires)
        return {**versions, **self._inherited(spec)}

    def _inherited(self, spec: RunSpec) -> Mapping[str, str]:
        """Settings that reach the engine from the user's own environment, and are not the cell's."""
        if spec.launcher == "docker":
            return {}
        ours = settings(spec.limits.threads, spec.limits.device_memory is not None)
        return {name: self.scrub(value) for name, value in provenance.settings().items() if name not in ours}

    def _of(self, spec: RunSpec, log: Path, on_event: EventSink) -> Sandbox:
        """The sandbox of a cell's engine, made ready once. Raises HarnessError."""
        key = f"{spec.launcher} {spec.image} {spec.engine}"
        if key not in self._sandbox:
            self._sandbox[key] = self._sandboxes[spec.launcher].of(spec, log, on_event)
        return self._sandbox[key]

    def launch(self, request: LaunchRequest, on_event: EventSink) -> RunRecord:
        """One RunRecord, whatever the workload does. KeyboardInterrupt passes through once the worker is gone."""
        spec = request.spec
        started_at = provenance.now()
        try:
            sandbox = self._of(spec, request.log, on_event)
        except HarnessError as exc:
            return RunRecord(spec, "", request.repeat, _refusal(exc), self.scrub(str(exc)), started_at)
        budget = spec.limits.host_memory
        idle = self._idle_bytes(sandbox, request) if budget is not None else 0
        if not isinstance(idle, int):
            return RunRecord(spec, "", request.repeat, idle[0], self.scrub(idle[1]), started_at)
        asked: Path | None = None
        if spec.workload.kind == "task":
            found = self._questions(request, on_event)
            if not isinstance(found, Path):
                return RunRecord(spec, "", request.repeat, found[0], self.scrub(found[1]), started_at)
            asked = found
        kept = KeptAnswers(request, asked)
        record, answers = kept.read() or self._run(sandbox, request, asked, idle, on_event)
        if record.status == "ok" and asked:
            kept.write(record, answers)
            status, reason, accuracy = self._judged(request, asked, answers, on_event)
            record = replace(record, status=status, reason=self.scrub(reason), accuracy=accuracy)
            if status == "ok":
                kept.drop()
        return record

    def _run(
        self, sandbox: Sandbox, request: LaunchRequest, asked: Path | None, idle: int, on_event: EventSink
    ) -> tuple[RunRecord, object]:  # fmt: skip
        """The launch itself: what it measured, and its answers to a task's questions."""
        spec = request.spec
        budget, gpu = spec.limits.host_memory, spec.limits.device_memory is not None
        limit = None if budget is None else idle + budget
        body = {
            "kind": "run",
            "spec": to_json(spec),
            "model": to_json(request.model),
            "launched": time.time(),
            "cache": str(self._cache),
        }
        body |= {} if asked is None else {"questions": str(asked)}
        task = Task(body, request.workdir, request.log, spec.timeout_s, limit, spec.limits.threads, gpu)
        started_at, start = provenance.now(), time.monotonic()
        outcome = sandbox.run(task, on_event)
        wall_s = round(time.monotonic() - start, 3)
        status, reason = judge(outcome, spec.timeout_s, limit)
        record = RunRecord(spec, "", request.repeat, status, self.scrub(reason), started_at)
        result = outcome.result or {}
        kept = ("load", "requests", "metrics", "measurements", "trace", "simulated")
        record = replace(
            from_json(RunRecord, to_json(record) | {k: result[k] for k in kept if k in result}),
            memory=MemoryLimit(outcome.cap_method, idle, budget, limit, outcome.peak_bytes, outcome.counts_page_cache),
            provenance={"packages": result.get("packages", {}), "settings": self._inherited(spec)}
            | ({"python": result["python"]} if "python" in result else {})
            | dict(sandbox.identity()),
            wall_s=wall_s,
        )
        return record, result.get("answers")

    def scrub(self, text: str) -> str:
        """`text` without the folders of this machine."""
        return provenance.scrub(text, self._places)

    def prepare(self, spec: RunSpec, workdir: Path, log: Path, on_event: EventSink) -> LocalModel | tuple[Status, str]:
        """Makes the cell's model ready in a process of its own, or says why it cannot be."""
        body = {"kind": "prepare", "spec": to_json(spec), "cache": str(self._cache)}
        outcome = self._helper.run(Task(body, workdir, log, _PREPARE_TIMEOUT_S), on_event)
        status, reason = _judge_helper(outcome, _PREPARE_TIMEOUT_S, "the model could not be prepared")
        if outcome.result and status == "ok":
            return from_json(LocalModel, outcome.result["found"]["model"])
        return status, self.scrub(reason)

    def measure_machine(
        self,
        model: LocalModel,
        rows: Sequence[int],
        dtypes: Sequence[str],
        threads: int | None,
        gpu: bool,
        workdir: Path,
        log: Path,
    ) -> MachineRates:
        """Disk bandwidth on the model's own files and GEMM rates at its shape, now; empty where not measurable."""
        body = {
            "kind": "machine",
            "folder": model.path,
            "gemm_shape": (model.shape.hidden, model.shape.ffn),
            "rows": rows,
            "dtypes": sorted({"float32", model.dtype, *dtypes} - {"auto"}),
            "threads": threads,
            "gpu": gpu,
        }
        outcome = self._helper.run(Task(body, workdir, log, _HELPER_TIMEOUT_S, threads=threads, gpu=gpu))
        found = (outcome.result or {}).get("found", {})
        return from_json(MachineRates, found | {"measured_at": provenance.now()})

    def calibrate(self, workdir: Path, log: Path, on_event: EventSink) -> None:
        """Leaves a quick profile of this host in the cache. Raises HarnessError where it cannot."""
        outcome = self._helper.run(
            Task({"kind": "calibrate", "cache": str(self._cache)}, workdir, log, _HELPER_TIMEOUT_S), on_event
        )
        status, reason = judge(outcome, _HELPER_TIMEOUT_S, None)
        if status != "ok":
            raise HarnessError(f"this host could not be measured: {self.scrub(reason)}")

    def _questions(self, request: LaunchRequest, on_event: EventSink) -> Path | tuple[Status, str]:
        """The file of a task's questions, made once for all cells that ask the same model the same."""
        spec, model = request.spec, request.model
        key = json.dumps([to_json(spec.workload), spec.seed, model.digest, spec.engine, str(request.data)])
        path = request.workdir.parent / "questions" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            body = {"kind": "ask", **self._task_body(request, path)}
            outcome = self._helper.run(Task(body, request.workdir, request.log, _PREPARE_TIMEOUT_S), on_event)
            status, reason = _judge_helper(outcome, _PREPARE_TIMEOUT_S, "the task could not be read")
            if status != "ok":
                return status, reason
        return path

    def _judged(
        self, request: LaunchRequest, questions: Path, answers: object, on_event: EventSink
    ) -> tuple[Status, str, Accuracy | None]:
        """What a launch's answers are worth, with the launch's status."""
        body = {"kind": "judge", "answers": answers, **self._task_body(request, questions)}
        outcome = self._helper.run(Task(body, request.workdir, request.log, _PREPARE_TIMEOUT_S), on_event)
        status, reason = _judge_helper(outcome, _PREPARE_TIMEOUT_S, "no judgement")
        if status == "ok" and outcome.result:
            return "ok", "", from_json(Accuracy, outcome.result["found"]["accuracy"])
        return status, f"its answers were not judged, and are kept until it runs again: {reason}", None

    def _task_body(self, request: LaunchRequest, questions: Path) -> dict[str, object]:
        return {
            "spec": to_json(request.spec),
            "model": to_json(request.model),
            "data": None if request.data is None else str(request.data.resolve()),
            "cache": str(self._cache),
            "questions": str(questions),
        }

    def _idle_bytes(self, sandbox: Sandbox, request: LaunchRequest) -> int | tuple[Status, str]:
        """Anonymous memory of the engine's process after it ran a negligible model, measured once an engine.

        File-backed pages are left out: shared libraries already cached are not charged to the cell. An engine
        that cannot run even that has no floor: its status and reason instead.
        """
        spec, model = request.spec, request.model
        engine = [
            spec.launcher,
            spec.image,
            spec.engine,
            to_json(spec.options),
            spec.policy.compute_dtype,
            spec.policy.weight_bits,
            spec.policy.kv_bits,
            spec.limits.threads,
            spec.limits.device_memory is not None,
        ]
        key = json.dumps([*engine, model.dtype, model.shape.family])
        if key not in self._idle:
            measured = self._measure_idle(sandbox, request)
            if not isinstance(measured, int):
                return measured
            self._idle[key] = measured
        return self._idle[key]

    def _measure_idle(self, sandbox: Sandbox, request: LaunchRequest) -> int | tuple[Status, str]:
        spec, model = request.spec, request.model
        tiny: LocalModel | None = None
        if model.path:
            small = ModelSpec(registry.tiny_model(model.shape.family), "dummy", model.dtype)
            made = self.prepare(replace(spec, model=small), request.workdir, request.log, ignore_events)
            if not isinstance(made, LocalModel):
                return made
            tiny = made
        body = {"kind": "idle", "spec": to_json(spec), "model": to_json(tiny), "cache": str(self._cache)}
        gpu = spec.limits.device_memory is not None
        threads = spec.limits.threads
        task = Task(body, request.workdir, request.log, _HELPER_TIMEOUT_S, threads=threads, gpu=gpu)
        outcome = sandbox.run(task, ignore_events)
        status, reason = _judge_helper(outcome, _HELPER_TIMEOUT_S, "its idle footprint could not be measured")
        if outcome.result and status == "ok":
            return int(outcome.result["found"]["anonymous_bytes"])
        return status, reason


def _refusal(exc: HarnessError) -> Status:
    return "unsupported" if isinstance(exc, UnsupportedError) else "error"


def _judge_helper(outcome: Outcome, timeout_s: float, what: str) -> tuple[Status, str]:
    """As `judge`. That a helper took too long or too much says nothing about the cell, which may be tried again."""
    status, reason = judge(outcome, timeout_s, None)
    return ("error", f"{what}: {reason}") if status in ("timeout", "oom_host", "oom_device") else (status, reason)


def judge(outcome: Outcome, timeout_s: float, limit: int | None) -> tuple[Status, str]:
    """Status and reason from the evidence: the kernel's OOM count, then the clock, the worker's word, the exit."""
    if outcome.refused:
        return outcome.refused
    status: Status = "error" if outcome.result is None else outcome.result["status"]
    reason: str = "" if outcome.result is None else outcome.result["reason"]
    if outcome.oom_kills and status != "ok":
        status = "oom_host"
        where = "for want of memory outside the cell" if limit is None else f"at its limit of {limit / 2**20:.0f} MiB"
        reason = f"killed {where} ({outcome.oom_kills} OOM kills)"
    elif outcome.timed_out:
        status, reason = "timeout", f"not done after {timeout_s:.0f} s"
    elif outcome.result is None and outcome.exit_code == EXIT_DISK_FULL:
        status, reason = "disk_full", "no space left for the worker's result; free space where the cache is"
    elif outcome.result is None:
        code = outcome.exit_code
        died = -code in {s.value for s in signal.Signals}
        end = f"died of {signal.Signals(-code).name}" if died else f"exited with {code}"
        reason = f"worker {end}; last log lines: {outcome.log_tail}"
    return status, reason
