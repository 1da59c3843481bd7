"""The `process` launcher: each cell in a fresh, memory-capped Python process, judged from evidence."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness import provenance, registry
from harness.api import (
    EventSink,
    HarnessError,
    LaunchRequest,
    LocalModel,
    MachineRates,
    MemoryLimit,
    ModelSpec,
    RunRecord,
    RunSpec,
    Status,
    from_json,
    to_json,
)
from harness.launchers.memory import sweep_stale_groups
from harness.launchers.sandbox import Outcome, Task, ignore_events, run_task
from harness.worker import EXIT_DISK_FULL

_HELPER_TIMEOUT_S = 600.0
_PREPARE_TIMEOUT_S = 24 * 3600.0


class ProcessLauncher:
    """Launches cells as processes on this host. `places` maps folders to the names they have in records."""

    def __init__(self, cache: Path, places: Mapping[str, str]) -> None:
        self._cache = cache
        self._places = places
        self._idle: dict[str, int] = {}
        sweep_stale_groups()

    def launch(self, request: LaunchRequest, on_event: EventSink) -> RunRecord:
        """One RunRecord, whatever the workload does. KeyboardInterrupt passes through once the worker is gone."""
        spec = request.spec
        started_at, start = provenance.now(), time.monotonic()
        budget = spec.limits.host_memory
        idle = self._idle_bytes(request) if budget is not None else 0
        if not isinstance(idle, int):
            return RunRecord(spec, "", request.repeat, idle[0], self.scrub(idle[1]), started_at)
        limit = None if budget is None else idle + budget
        body = {
            "kind": "run",
            "spec": to_json(spec),
            "model": to_json(request.model),
            "launched": time.time(),
            "cache": str(self._cache),
        }
        if spec.workload.kind == "task":
            asked = self._questions(request, on_event)
            if not isinstance(asked, Path):
                return RunRecord(spec, "", request.repeat, asked[0], self.scrub(asked[1]), started_at)
            body["questions"] = str(asked)
        task = Task(body, request.workdir, request.log, spec.timeout_s, limit, spec.limits.threads)
        outcome = run_task(task, on_event)
        status, reason = judge(outcome, spec.timeout_s, limit)
        record = RunRecord(spec, "", request.repeat, status, self.scrub(reason), started_at)
        result = outcome.result or {}
        kept = ("load", "requests", "metrics", "measurements", "trace", "simulated")
        measured = {k: result[k] for k in kept if k in result}
        if status == "ok" and "questions" in body:
            status, reason, measured["accuracy"] = self._judged(request, body["questions"], result["answers"], on_event)
            record = replace(record, status=status, reason=self.scrub(reason))
        return replace(
            from_json(RunRecord, to_json(record) | measured),
            wall_s=round(time.monotonic() - start, 3),
            memory=MemoryLimit(outcome.cap_method, idle, budget, limit, outcome.peak_bytes, outcome.counts_page_cache),
            provenance={"packages": result.get("packages", {})},
        )

    def scrub(self, text: str) -> str:
        """`text` without the folders of this machine."""
        return provenance.scrub(text, self._places)

    def prepare(self, spec: RunSpec, workdir: Path, log: Path, on_event: EventSink) -> LocalModel | tuple[Status, str]:
        """Makes the cell's model ready in a process of its own, or says why it cannot be."""
        body = {"kind": "prepare", "spec": to_json(spec), "cache": str(self._cache)}
        outcome = run_task(Task(body, workdir, log, _PREPARE_TIMEOUT_S), on_event)
        status, reason = judge(outcome, _PREPARE_TIMEOUT_S, None)
        if outcome.result and status == "ok":
            return from_json(LocalModel, outcome.result["found"]["model"])
        return status, self.scrub(reason)

    def measure_machine(
        self,
        model: LocalModel,
        rows: Sequence[int],
        dtypes: Sequence[str],
        threads: int | None,
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
        }
        outcome = run_task(Task(body, workdir, log, _HELPER_TIMEOUT_S, threads=threads))
        found = (outcome.result or {}).get("found", {})
        return from_json(MachineRates, found | {"measured_at": provenance.now()})

    def calibrate(self, workdir: Path, log: Path, on_event: EventSink) -> None:
        """Leaves a quick profile of this host in the cache. Raises HarnessError where it cannot."""
        outcome = run_task(
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
            outcome = run_task(Task(body, request.workdir, request.log, _PREPARE_TIMEOUT_S), on_event)
            status, reason = judge(outcome, _PREPARE_TIMEOUT_S, None)
            if status != "ok":
                return status, reason
        return path

    def _judged(
        self, request: LaunchRequest, questions: str, answers: object, on_event: EventSink
    ) -> tuple[Status, str, object]:
        """What a launch's answers are worth, as plain data, with the launch's status."""
        body = {"kind": "judge", "answers": answers, **self._task_body(request, Path(questions))}
        outcome = run_task(Task(body, request.workdir, request.log, _PREPARE_TIMEOUT_S), on_event)
        status, reason = judge(outcome, _PREPARE_TIMEOUT_S, None)
        if status == "ok" and outcome.result:
            return "ok", "", outcome.result["found"]["accuracy"]
        return status, f"its answers were not judged: {reason}", None

    def _task_body(self, request: LaunchRequest, questions: Path) -> dict[str, object]:
        return {
            "spec": to_json(request.spec),
            "model": to_json(request.model),
            "data": None if request.data is None else str(request.data.resolve()),
            "cache": str(self._cache),
            "questions": str(questions),
        }

    def _idle_bytes(self, request: LaunchRequest) -> int | tuple[Status, str]:
        """Anonymous memory of the engine's process after it ran a negligible model, measured once an engine.

        File-backed pages are left out: shared libraries already cached are not charged to the cell. An engine
        that cannot run even that has no floor: its status and reason instead.
        """
        spec, model = request.spec, request.model
        engine = [spec.engine, to_json(spec.options), spec.policy.compute_dtype, spec.limits.threads]
        key = json.dumps([*engine, model.dtype, model.shape.family])
        if key not in self._idle:
            measured = self._measure_idle(request)
            if not isinstance(measured, int):
                return measured
            self._idle[key] = measured
        return self._idle[key]

    def _measure_idle(self, request: LaunchRequest) -> int | tuple[Status, str]:
        spec, model = request.spec, request.model
        tiny: LocalModel | None = None
        if model.path:
            small = ModelSpec(registry.tiny_model(model.shape.family), "dummy", model.dtype)
            made = self.prepare(replace(spec, model=small), request.workdir, request.log, ignore_events)
            if not isinstance(made, LocalModel):
                return made
            tiny = made
        body = {"kind": "idle", "spec": to_json(spec), "model": to_json(tiny), "cache": str(self._cache)}
        outcome = run_task(Task(body, request.workdir, request.log, _HELPER_TIMEOUT_S, threads=spec.limits.threads))
        status, reason = judge(outcome, _HELPER_TIMEOUT_S, None)
        if outcome.result and status == "ok":
            return int(outcome.result["found"]["anonymous_bytes"])
        return status, reason


def judge(outcome: Outcome, timeout_s: float, limit: int | None) -> tuple[Status, str]:
    """Status and reason from the evidence: the kernel's OOM count, then the clock, the worker's word, the exit."""
    status: Status = "error" if outcome.result is None else outcome.result["status"]
    reason: str = "" if outcome.result is None else outcome.result["reason"]
    if outcome.oom_kills and status != "ok":
        status = "oom_host"
        where = "for want of memory outside the cell" if limit is None else f"at its limit of {limit / 2**20:.0f} MiB"
        reason = f"killed {where} ({outcome.oom_kills} OOM kills)"
    elif outcome.timed_out:
        status, reason = "timeout", f"not done after {timeout_s:.0f} s"
    elif outcome.result is None and outcome.exit_code == EXIT_DISK_FULL:
        status, reason = "disk_full", "no space left for the worker's result; free space where --out is"
    elif outcome.result is None:
        code = outcome.exit_code
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        reason = f"worker {end}; last log lines: {outcome.log_tail}"
    return status, reason
