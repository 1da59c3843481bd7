"""Runs a suite: expand, skip what is done, launch interleaved, persist. The one place that decides a status."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import registry
from harness.api import (
    Forecast,
    HardwareProfile,
    HarnessError,
    Launcher,
    LaunchRequest,
    LocalModel,
    MachineRates,
    ModelSpec,
    RunRecord,
    RunSpec,
    Status,
    SuiteSpec,
    Trial,
)
from harness.common.classify import classify
from harness.common.files import file_digest, is_there
from harness.common.roofline import bound_of
from harness.hardware import provenance
from harness.hardware.local_profile import LocalProfile
from harness.launchers.images import code_digest
from harness.launchers.launcher import CellLauncher
from harness.launchers.memory import cap_method
from harness.run.steps import Step, interleave
from harness.run.store import Store, is_done, write_suite_copy
from harness.run.tuning import CEILING, Patience, Remembered, choose, lasting, search_max_batch, settled
from harness.suite.cell_names import find_twins

#: Repeating these cannot end otherwise, so the cell's other repeats are left out, now and on resume.
_REFUSALS = ("infeasible", "unsupported", "timeout")
_NO_MEMORY = ("oom_host", "oom_device")
#: So are those of a cell whose batch search failed, until the next run.
_NOT_REPEATED = (*_REFUSALS, "skipped")
_MACHINE_PROBE_MAX_AGE_S = 60.0
#: Rows at which GEMM rates are taken: from one sequence's decode to a large prefill.
_PROBED_ROWS = (1, 4, 16, 64, 256, 1024)


class Progress(Protocol):
    """Where progress is shown. `done` launches come with the number of seconds they took."""

    def planned(self, steps: Sequence[Step], already_done: int) -> None: ...

    def started(self, step: Step, activity: str) -> None: ...

    def event(self, phase: str, done: int, total: int) -> None: ...

    def finished(self, step: Step, record: RunRecord) -> None: ...

    def dropped(self, step: Step) -> None: ...

    def added(self, steps: Sequence[Step]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class _Settled:
    """A cell with its searched batch, None where none survives; how it was found, and under which key that is kept."""

    spec: RunSpec | None
    trials: tuple[Trial, ...]
    key: str


class Runner:
    """Runs cells of a suite into a run directory.

    Launches are interleaved: each round runs every cell once, starting one cell later than the round before,
    so that a machine that drifts drifts over all cells alike.
    """

    def __init__(
        self, suite: SuiteSpec, suite_file: Path, out: Path, cache: Path, progress: Progress, command: str,
        data: Path | None = None,
    ) -> None:  # fmt: skip
        self._suite = suite
        self._suite_file = suite_file
        self._out = out
        self._cache = cache
        self._progress = progress
        self._command = command
        self._data = data
        self._store = Store(out)
        self._models: dict[tuple[str, ModelSpec], LocalModel | tuple[Status, str]] = {}
        self._settled: dict[str, _Settled] = {}
        self._digests: dict[str, str] = {}
        self._machine: dict[tuple[str, int | None, bool], tuple[float, MachineRates | None]] = {}
        self._profile = LocalProfile(cache)
        self._places = self._named_places()
        self._dropped: set[str] = set()

    def run(self, cells: Sequence[RunSpec], fresh: bool = False) -> list[RunRecord]:
        """Runs what is not done yet and returns the last record of every launch of `cells`.

        Raises HarnessError for what stops the whole run, KeyboardInterrupt after recording the cell in flight.
        """
        if twins := find_twins(cells):
            raise HarnessError(f"cells {twins[0]!r} and {twins[1]!r} measure the same here; choose one with --cell")
        self._store.open(fresh)
        try:
            for kept in (self._out / "logs").glob("*.answers.json") if fresh else ():
                kept.unlink()
            shutil.rmtree(self._work, ignore_errors=True)
            write_suite_copy(self._suite_file, self._out)
            done = self._carry_over(cells)
            if strangers := {r.fingerprint for r in self._store.latest().values()} - {c.fingerprint() for c in cells}:
                self._progress.note(
                    f"{self._out} also holds records of {len(strangers)} other cells; reports show both"
                )
            self._digests = {r.fingerprint: r.model.digest for r in done.values() if r.model}
            self._dropped = {r.fingerprint for r in done.values() if r.status in _REFUSALS}
            steps = [s for s in interleave(cells) if s.cell.fingerprint() not in self._dropped]
            todo = [s for s in steps if (s.cell.fingerprint(), s.repeat) not in done]
            self._progress.planned(todo, len(steps) - len(todo))
            if todo:
                self._launcher: Launcher = CellLauncher(self._cache, self._places)
                self._launcher.ready({s.cell.launcher for s in todo})
                self._provenance = provenance.collect()
                if self._provenance["git"] is None:  # such as in a container: then the code itself says what it is
                    self._provenance["code"] = code_digest()
                self._remembered = Remembered(self._cache / "max_batch.json", provenance.machine_key())
                for i, step in enumerate(todo):
                    if step.cell.fingerprint() not in self._dropped:
                        self._step(step)
                        self._drop_repeats(step.cell, todo[i + 1 :])
            wanted = {c.fingerprint() for c in cells}
            return [r for r in self._store.latest().values() if r.fingerprint in wanted]
        finally:
            shutil.rmtree(self._work, ignore_errors=True)
            self._store.close()

    def _named_places(self) -> dict[str, str]:
        """Folders of this machine, as given and as they are, and what stands for them in records."""
        named = [(self._cache, "$CACHE"), (self._out, "$OUT")]
        if self._data is not None:
            named.append((self._data, "$DATA"))
        for cell in self._suite.cells:
            for name, path in (("$MODELS", cell.model.id), ("$TRACES", cell.workload.trace)):
                if is_there(path):
                    named.append((Path(path).absolute().parent, name))
        found = {str(p): name for path, name in reversed(named) for p in (path.absolute(), path.resolve())}
        return {path: name for path, name in found.items() if path != "/"}

    @property
    def _work(self) -> Path:
        """Where launches are exchanged. In the cache, so that what engines write to read it again is on one disk with
        the models, wherever results go; nobody else has this results folder open."""
        return self._cache.resolve() / "work" / hashlib.sha256(os.fsencode(self._out.resolve())).hexdigest()[:12]

    def _log(self, cell: RunSpec) -> Path:
        return self._out.resolve() / "logs" / f"{cell.name}.log"

    def _carry_over(self, cells: Sequence[RunSpec]) -> dict[tuple[str, int], RunRecord]:
        """Records that settle launches of `cells`. Reports read records: one whose labels changed is written anew."""
        current = {c.fingerprint(): c for c in cells}
        done = {}
        for key, record in self._store.latest().items():
            cell = current.get(record.fingerprint)
            if cell is None or not is_done(record, cell) or not self._of_these_data(record):
                continue
            labels = {name: getattr(cell, name) for name in ("suite", "name", "expect", "reference")}
            labelled = replace(record.spec, **labels)
            if labelled != record.spec:
                self._store.append(replace(record, spec=labelled, command=self._command_of(cell)))
            done[key] = record
        return done

    def _of_these_data(self, record: RunRecord) -> bool:
        """Whether the files that a task was made from are what the folder of data holds now."""
        if self._data is None or record.accuracy is None:
            return True
        return all(file_digest(self._data / name) == digest for name, digest in record.accuracy.files.items())

    def _without_places(self, cell: RunSpec) -> RunSpec:
        """Without folders of this machine."""
        model = replace(cell.model, id=provenance.scrub(cell.model.id, self._places))
        job = replace(cell.workload, trace=provenance.scrub(cell.workload.trace, self._places))
        return replace(cell, model=model, workload=job)

    def _command_of(self, cell: RunSpec) -> str:
        return provenance.scrub(f"{self._command} --cell {cell.name}", self._places)

    def _step(self, step: Step) -> None:
        """Measures and records a launch; where its searched batch did not survive again, once more with a smaller one,
        and so the repeats before it: the figures of a cell are of one batch."""
        try:
            record = self._measure(step)
        except KeyboardInterrupt:
            self._append(step, RunRecord(step.cell, "", step.repeat, "interrupted", "interrupted by the user"))
            raise
        self._append(step, record)
        if record.status in _NO_MEMORY and self._takes_less(step.cell, record):
            again = [Step(step.cell, repeat) for repeat in range(step.repeat + 1)]
            self._progress.added(again)
            for one in again:
                self._step(one)

    def _takes_less(self, cell: RunSpec, record: RunRecord) -> bool:
        """Whether there is a smaller batch than the searched one, which did not survive again; then it is taken."""
        old = self._settled.get(cell.fingerprint())
        if old is None or old.spec is None:
            return False
        batch = old.spec.policy.gpu_batch_size
        failed = Trial(batch, record.status, None, f"in repeat {record.repeat + 1}: {record.reason}")
        self._settle(cell, (*old.trials, failed), old.key)
        self._progress.note(f"{cell.name}: batch {batch} did not survive again; a smaller one is taken")
        return self._settled[cell.fingerprint()].spec is not None or batch > 1

    def _settle(self, cell: RunSpec, trials: tuple[Trial, ...], key: str) -> None:
        """Takes the best batch of these trials."""
        batch = choose(trials)
        self._settled[cell.fingerprint()] = _Settled(None if batch is None else settled(cell, batch), trials, key)
        if lasting(trials):
            self._remembered.put(key, trials)

    def _drop_repeats(self, cell: RunSpec, later: Sequence[Step]) -> None:
        """Tells how much shorter the run became, if `cell` will not be repeated."""
        if cell.fingerprint() in self._dropped:
            for step in later:
                if step.cell == cell:
                    self._progress.dropped(step)

    def _append(self, step: Step, record: RunRecord) -> None:
        cell = step.cell
        record = replace(
            record,
            spec=self._without_places(cell),
            fingerprint=cell.fingerprint(),
            provenance=self._provenance | dict(record.provenance),
            command=self._command_of(cell),
            log=f"logs/{cell.name}.log",
        )
        self._store.append(record)
        if record.status in _NOT_REPEATED:
            self._dropped.add(record.fingerprint)
        self._progress.finished(step, record)

    def _measure(self, step: Step) -> RunRecord:
        """Everything that leads to one record: model, batch, machine rates, launch, bound."""
        cell = step.cell
        model = self._model(step)
        if not isinstance(model, LocalModel):
            return _refused(step, *model)
        if self._digests.get(cell.fingerprint(), model.digest) != model.digest:
            raise HarnessError(f"model {cell.model.id} changed since {cell.name} was measured; --fresh measures it all")
        if cell.tune.startswith("search"):
            try:
                cell = registry.searched(cell, model, self._host(step), registry.lengths(cell.workload))
            except HarnessError as exc:
                return _refused(step, *classify(exc))
        spec, trials = self._with_batch(step, cell, model)
        if spec is None:
            statuses = ", ".join(f"batch {t.gpu_batch_size}: {t.status}" for t in trials)
            last = trials[-1]
            status = last.status if last.status in (*_NO_MEMORY, *_NOT_REPEATED) else "skipped"
            reason = f"no batch survives ({statuses}); {last.reason}"
            return replace(_refused(step, status, reason), tuning=trials, model=_shareable(model))
        machine = self._machine_rates(step, model)
        self._progress.started(step, f"repeat {step.repeat + 1}/{cell.repeats}")
        record = self._launch(spec, step.repeat, model)
        record = replace(record, machine=machine, tuning=trials, model=_shareable(model))
        if machine and record.status == "ok":
            record = replace(record, bound=bound_of(record, machine), predicted=self._forecast(step, record))
        return record

    def _forecast(self, step: Step, record: RunRecord) -> Forecast | None:
        """What the performance model says of a launch, by this host's profile."""
        if record.spec.workload.kind == "task" or not registry.engine_entry(record.spec.engine).predicted:
            return None
        try:
            return registry.forecast(record, self._host(step))
        except Exception as exc:  # what was measured is kept, whatever becomes of its prediction
            self._progress.note(f"{record.spec.name}: not predicted: {exc}")
            return None

    def _host(self, step: Step) -> HardwareProfile:
        """The profile of this host; measured, quickly, where there is none yet. Raises HarnessError."""

        def measure() -> None:
            self._progress.started(step, "measuring this host, once")
            self._launcher.calibrate(self._work / "calibrate", self._log(step.cell), self._progress.event)

        return self._profile.get(measure)

    def _launch(self, spec: RunSpec, repeat: int, model: LocalModel) -> RunRecord:
        if model.path:
            try:
                registry.evict_model(model.path)
            except OSError as exc:
                reason = f"cannot read {exc.filename or 'the model'}: {exc.strerror}; make it readable"
                return RunRecord(spec, "", repeat, "error", self._launcher.scrub(reason), provenance.now())
        request = LaunchRequest(spec, repeat, model, self._work / f"{spec.name}-{repeat}", self._log(spec), self._data)
        return self._launcher.launch(request, self._progress.event)

    def _model(self, step: Step) -> LocalModel | tuple[Status, str]:
        spec = step.cell.model
        key = (registry.engine_entry(step.cell.engine).builtin_model, spec)
        if key not in self._models:
            self._progress.started(step, f"preparing {spec.id}")
            self._models[key] = self._launcher.prepare(
                step.cell, self._work / "prepare", self._log(step.cell), self._progress.event
            )
        return self._models[key]

    def _with_batch(self, step: Step, cell: RunSpec, model: LocalModel) -> tuple[RunSpec | None, tuple[Trial, ...]]:
        """The cell with a settled batch and the trials that settled it; None where no batch survives."""
        if cell.tune == "none":
            return cell, ()
        if cell.fingerprint() not in self._settled:
            runs_in = self._launcher.environment(cell, self._log(cell), self._progress.event)
            if isinstance(runs_in, tuple):
                return None, (Trial(cell.policy.gpu_batch_size, runs_in[0], None, runs_in[1]),)
            memory_key = self._remembered.key(cell, runs_in, model.digest, cap_method())
            trials = self._remembered.get(memory_key)
            if trials is None:
                requests = cell.workload.num_requests
                ceiling = CEILING if requests == "auto" else min(CEILING, requests)
                trials = self._search(step, model, cell.policy.gpu_batch_size, ceiling)
            self._settle(cell, trials, memory_key)
        found = self._settled[cell.fingerprint()]
        if found.spec is None and any(t.status == "ok" for t in found.trials):  # once, and not again
            least = min(t.gpu_batch_size for t in found.trials if t.status != "ok")
            self._settle(cell, (*found.trials, *self._search(step, model, least // 2, least - 1)), found.key)
            found = self._settled[cell.fingerprint()]
        return found.spec, found.trials

    def _search(self, step: Step, model: LocalModel, start: int, ceiling: int) -> tuple[Trial, ...]:
        patience = Patience(step.cell.timeout_s)

        def attempt(batch: int) -> Trial:
            self._progress.started(step, f"searching the largest batch: {batch}")
            cell = replace(settled(step.cell, batch), timeout_s=patience.seconds(batch))
            record = self._launch(cell, step.repeat, model)
            speed = None
            if record.status == "ok":
                patience.learn(batch, record.wall_s)
                speed = record.metrics.get("generation_throughput_tok_s")
            rate = f", {speed:.3g} tok/s" if speed else ""
            self._progress.note(f"{step.cell.name}: batch {batch}: {record.status}{rate}")
            return Trial(batch, record.status, speed, record.reason)

        return search_max_batch(start, attempt, ceiling)

    def _machine_rates(self, step: Step, model: LocalModel) -> MachineRates | None:
        """Rates measured at most a minute before the launch, so that they drift with what they bound."""
        if not self._suite.machine_probe or not model.path:
            return None
        cell = step.cell
        gpu = cell.limits.device_memory is not None
        key = (model.path, cell.limits.threads, gpu)
        read_at, profile = self._machine.get(key, (float("-inf"), None))
        if time.monotonic() - read_at > _MACHINE_PROBE_MAX_AGE_S:
            self._progress.started(step, "measuring disk and GEMM rates")
            with contextlib.suppress(OSError):  # the launch will say that the model cannot be read
                registry.evict_model(model.path)
            dtypes = {c.policy.compute_dtype for c in self._suite.cells}
            profile = self._launcher.measure_machine(
                model, _PROBED_ROWS, sorted(dtypes), cell.limits.threads, gpu, self._work / "machine", self._log(cell)
            )
            self._machine[key] = (time.monotonic(), profile)
        return profile


def unexpected(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Records that did not end as their cell expected."""
    return [r for r in records if r.status != r.spec.expect]


def _refused(step: Step, status: Status, reason: str) -> RunRecord:
    return RunRecord(step.cell, "", step.repeat, status, reason, provenance.now())


def _shareable(model: LocalModel) -> LocalModel:
    """Without the folder of this machine."""
    return replace(model, path=Path(model.path).name)
