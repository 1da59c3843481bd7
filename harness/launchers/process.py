"""Runs one cell in a fresh Python process under a memory cap, and says from evidence how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import provenance
from harness.api import (
    EventSink,
    HarnessError,
    HardwareProfile,
    LaunchRequest,
    LocalModel,
    MemoryLimit,
    RunRecord,
    RunSpec,
    Status,
    from_json,
    to_json,
)
from harness.launchers.memory import MemoryGroup, make_group, sweep_stale_groups
from harness.worker import EVENTS, REQUEST, RESULT

_POLL_S = 0.05
_HELPER_TIMEOUT_S = 600.0
_LOG_TAIL_LINES = 3


@dataclass(frozen=True)
class Outcome:
    """How a worker process ended."""

    result: dict[str, Any] | None
    exit_code: int
    timed_out: bool
    oom_kills: int
    peak_bytes: int | None
    log_tail: str


class ProcessLauncher:
    """The `process` launcher: one worker process a launch, killed with its children when its time is over."""

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
        limit = None if budget is None else idle + budget
        group = make_group(limit)
        body = {
            "kind": "run",
            "spec": to_json(spec),
            "model": to_json(request.model),
            "limits": to_json(spec.limits),
            "launched": time.time(),
        }
        outcome = self._run(body, request.workdir, request.log, group, spec.timeout_s, on_event, spec.limits.threads)
        status, reason = judge(outcome, spec.timeout_s, limit)
        result = outcome.result or {}
        memory = MemoryLimit(group.method, idle, budget, limit, outcome.peak_bytes, group.counts_page_cache)
        record = RunRecord(spec, "", request.repeat, status, provenance.scrub(reason, self._places), started_at)
        fields = {k: result[k] for k in ("load", "requests", "metrics", "measurements") if k in result}
        return replace(
            from_json(RunRecord, to_json(record) | fields),
            spec=spec,
            wall_s=round(time.monotonic() - start, 3),
            memory=memory,
            simulated=bool(result.get("simulated")),
            provenance={"packages": result.get("packages", {})},
        )

    def prepare(self, spec: RunSpec, workdir: Path, log: Path, on_event: EventSink) -> LocalModel | tuple[Status, str]:
        """Makes the cell's model ready in a process of its own, or says why it cannot be."""
        body = {"kind": "prepare", "spec": to_json(spec), "cache": str(self._cache)}
        outcome = self._run(body, workdir, log, make_group(None), 24 * 3600.0, on_event)
        if outcome.result and outcome.result["status"] == "ok":
            return from_json(LocalModel, outcome.result["model"])
        if outcome.result:
            return outcome.result["status"], provenance.scrub(outcome.result["reason"], self._places)
        return judge(outcome, 24 * 3600.0, None)

    def measure_machine(
        self, folder: str, gemm_shape: tuple[int, int], rows: list[int], dtypes: list[str], threads: int | None,
        workdir: Path, log: Path,
    ) -> HardwareProfile:  # fmt: skip
        """Disk bandwidth on the model's own files and GEMM rates, now. Empty where a rate cannot be measured."""
        body = {"kind": "machine", "folder": folder, "gemm_shape": gemm_shape, "rows": rows, "dtypes": dtypes}
        body["threads"] = threads
        outcome = self._run(body, workdir, log, make_group(None), _HELPER_TIMEOUT_S, _ignore, threads)
        measured = outcome.result or {}
        return from_json(HardwareProfile, measured | {"measured_at": provenance.now()})

    def _idle_bytes(self, request: LaunchRequest) -> int:
        """Anonymous memory of the engine's process with everything imported and nothing loaded, measured once.

        File-backed pages are left out: shared libraries already cached are not charged to the cell.
        """
        key = json.dumps([request.spec.engine, to_json(request.spec.options)], sort_keys=True)
        if key not in self._idle:
            body = {"kind": "idle", "spec": to_json(request.spec)}
            outcome = self._run(body, request.workdir, request.log, make_group(None), _HELPER_TIMEOUT_S, _ignore)
            # An engine that cannot even start has no floor; its own launch says why.
            self._idle[key] = int(outcome.result["anonymous_bytes"]) if outcome.result else 0
        return self._idle[key]

    def _run(
        self, body: dict[str, Any], workdir: Path, log: Path, group: MemoryGroup, timeout_s: float,
        on_event: EventSink, threads: int | None = None,
    ) -> Outcome:  # fmt: skip
        shutil.rmtree(workdir, ignore_errors=True)
        try:
            workdir.mkdir(parents=True)
            (workdir / REQUEST).write_text(json.dumps(body))
            with log.open("ab") as sink:
                sink.write(f"=== {body['kind']} {provenance.now()}\n".encode())
                offset = sink.tell()
                return self._watch(sink, offset, log, workdir, group, timeout_s, on_event, threads)
        except OSError as exc:
            raise HarnessError(
                f"cannot write to {exc.filename or workdir}: {exc.strerror}; free space or choose another --out"
            ) from exc
        finally:
            group.kill()
            group.close()
            shutil.rmtree(workdir, ignore_errors=True)

    def _watch(
        self, sink: Any, offset: int, log: Path, workdir: Path, group: MemoryGroup, timeout_s: float,
        on_event: EventSink, threads: int | None,
    ) -> Outcome:  # fmt: skip
        # -P: a folder named like one of our packages in the user's directory must not shadow it
        command = group.wrap([sys.executable, "-P", "-m", "harness.worker", str(workdir)])
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=_environment(threads),
            start_new_session=True,
        )  # fmt: skip
        timed_out = False
        try:
            group.adopt(process.pid)
            deadline = time.monotonic() + timeout_s
            events = _follow(workdir / EVENTS)
            while process.poll() is None:
                _deliver(next(events), on_event)
                if time.monotonic() > deadline:
                    timed_out = True
                    break
                time.sleep(_POLL_S)
            if not timed_out:
                _deliver(next(events), on_event)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            group.kill()
            exit_code = process.wait()
        result_file = workdir / RESULT
        result = json.loads(result_file.read_text()) if result_file.exists() else None
        tail = _tail(log, offset)
        return Outcome(result, exit_code, timed_out, group.oom_kills(), group.peak_bytes(), tail)


def judge(outcome: Outcome, timeout_s: float, limit: int | None) -> tuple[Status, str]:
    """Status and reason from the evidence: the kernel's OOM count first, then the worker's own word, then the exit."""
    if outcome.oom_kills and (outcome.result is None or outcome.result["status"] != "ok"):
        return "oom_host", f"killed at its memory limit of {(limit or 0) / 2**20:.0f} MiB ({outcome.oom_kills} OOM kill)"
    if outcome.timed_out:
        return "timeout", f"not done after {timeout_s:.0f} s"
    if outcome.result is not None:
        return outcome.result["status"], outcome.result["reason"]
    if outcome.exit_code < 0:
        name = signal.Signals(-outcome.exit_code).name
        return "error", f"worker died of {name}; last log lines: {outcome.log_tail}"
    return "error", f"worker exited with {outcome.exit_code}; last log lines: {outcome.log_tail}"


def _environment(threads: int | None) -> dict[str, str]:
    """The harness's environment; a model that is ready on disk needs no network."""
    env = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return env


def _follow(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields, at each call of next, the complete new lines of a growing JSON-lines file."""
    position = 0
    while True:
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                lines.append(json.loads(line))
        yield lines


def _deliver(events: list[dict[str, Any]], on_event: EventSink) -> None:
    for event in events:
        on_event(event["phase"], event["done"], event["total"])


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_TAIL_LINES:])[:800] or "(none)"


def _ignore(phase: str, done: int, total: int) -> None:
    """An event sink for processes nobody watches."""
