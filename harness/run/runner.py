"""Runs a suite: skips what is done, launches in interleaved rounds, records each launch."""

import contextlib
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from harness import api, registry
from harness.common.classify import classify
from harness.common.files import file_digest, inside, is_below, is_there, os_errors
from harness.common.scratch import remove_abandoned, scratch_folder
from harness.hardware import LocalProfile, provenance
from harness.launchers.launcher import CellLauncher
from harness.run.batches import Batches
from harness.run.options import Selection
from harness.run.progress import Progress
from harness.run.records import Draft, RecordBuilder
from harness.run.steps import REFUSALS, Step, possible
from harness.run.store import Store, is_done, write_suite_copy
from harness.run.tuning import Remembered
from harness.suite.cell_names import find_twins

_NO_MEMORY = ("oom_host", "oom_device")
#: A cell whose batch search failed is not repeated either, until the next run.
_NOT_REPEATED = (*REFUSALS, "skipped")
#: Of a cell whose batch search found none.
_NONE_SURVIVES = "no batch survives"
_MACHINE_PROBE_MAX_AGE_S = 60.0
#: How often a launch that others disturbed runs again.
EXTRA_TRIES = 2
#: After so many extra tries in a row that were disturbed too, the machine is as it is, and trying doubles the time.
_IN_VAIN = 4


class Runner:
    """Runs the selected cells of a suite into a run directory.

    `data`: the folder of accuracy tasks' data. `extra_tries`: how often a launch that others disturbed runs again.

    Launches are interleaved: each round runs every cell once, starting one cell later than the round before,
    so that a machine that drifts drifts over all cells alike.
    """

    def __init__(
        self, selection: Selection, out: Path, cache: Path, progress: Progress, data: Path | None = None,
        extra_tries: int = EXTRA_TRIES,
    ) -> None:  # fmt: skip
        self._suite = selection.suite
        self._selection = selection
        self._out = out
        self._cache = cache
        self._progress = progress
        self._data = data
        self._extra_tries = extra_tries
        self._store = Store(out)
        self._models: dict[tuple[str, api.ModelSpec], api.LocalModel | api.Refusal] = {}
        self._digests: dict[str, str] = {}
        self._machine: dict[tuple[str, int | None, bool], tuple[float, api.MachineRates | None]] = {}
        self._profile = LocalProfile(cache)
        self._places = self._named_places()
        self._records = RecordBuilder(selection.command, self._places)
        self._dropped: set[str] = set()
        self._in_vain = 0  # extra tries since a launch was undisturbed
        self._opened = contextlib.ExitStack()

    def run(self, fresh: bool = False) -> list[api.RunRecord]:
        """Runs what is not done yet and returns the last record of every launch of the cells.

        Raises HarnessError for what stops the whole run, KeyboardInterrupt after recording the cell in flight.
        """
        cells = self._selection.cells
        if twins := find_twins(cells):
            raise api.HarnessError(f"cells {twins[0]!r} and {twins[1]!r} measure the same here; choose one with --cell")
        whole = len(cells) == len(self._suite.cells)
        self._store.open(fresh and whole)
        try:
            if fresh:
                self._forget(cells, whole)
            remove_abandoned(self._cache)
            write_suite_copy(self._selection.path, self._out)
            done = self._carry_over(cells)
            fingerprints = {c.fingerprint() for c in cells}
            if strangers := {r.fingerprint for r in self._store.latest().values()} - fingerprints:
                self._progress.note(
                    f"{self._out} also holds records of {len(strangers)} other cells; reports show both"
                )
            self._digests = {r.fingerprint: r.model.digest for r in done.values() if r.model}
            self._dropped = {r.fingerprint for r in done.values() if r.status in REFUSALS}
            steps = possible(cells, done.values())
            todo = [s for s in steps if (s.cell.fingerprint(), s.repeat) not in done]
            self._progress.planned(todo, len(steps) - len(todo))
            if todo:
                self._start({s.cell.launcher for s in todo})
                for i, step in enumerate(todo):
                    if step.cell.fingerprint() not in self._dropped:
                        self._step(step)
                        self._drop_repeats(step.cell, todo[i + 1 :])
            return [r for r in self._store.latest().values() if r.fingerprint in fingerprints]
        finally:
            self._opened.close()
            self._store.close()

    def _forget(self, cells: Sequence[api.RunSpec], whole: bool) -> None:
        """Sets the records of `cells` aside, unless the file as a `whole` was, and removes their answers that wait to
        be judged."""
        if not whole:
            self._store.set_aside(cells)
        for cell in cells:
            for kept in (self._out / "logs").glob(f"{cell.name}.[0-9]*.answers.json"):
                kept.unlink()

    def _start(self, launchers: set[str]) -> None:
        """What only launches need.

        The exchange folders are in the cache, so that what engines write and read again is on one disk with the models,
        wherever results go; theirs is named after the results folder, which no other harness has open.
        """
        name = hashlib.sha256(os.fsencode(self._out.resolve())).hexdigest()[:12]
        with os_errors(f"cannot write to {self._cache}", "free space, or choose another --cache-dir"):
            self._work = self._opened.enter_context(scratch_folder(self._cache.resolve(), name))
        self._launcher = CellLauncher(self._cache, self._places)
        self._launcher.ready(launchers)
        self._records.collect_provenance(self._profile.prices())
        remembered = Remembered(self._cache / "max_batch.json", provenance.machine_key())
        self._batches = Batches(self._launcher, remembered, self._launch, self._progress)

    def _named_places(self) -> dict[str, str]:
        """Folders of this machine, as given and as resolved, and what stands for them in records."""
        named = [(self._cache, "$CACHE"), (self._out, "$OUT")]
        if self._data is not None:
            named.append((self._data, "$DATA"))
        for cell in self._suite.cells:
            for name, path in (("$MODELS", cell.model.id), ("$TRACES", cell.workload.trace)):
                if is_there(path):
                    named.append((Path(path).absolute().parent, name))
        places = {str(p): name for path, name in reversed(named) for p in (path.absolute(), path.resolve())}
        return {path: name for path, name in places.items() if path != "/"}

    def _exchange(self, cell: api.RunSpec, name: str) -> api.Exchange:
        log = inside(self._out.resolve(), f"logs/{cell.name}.log")
        return api.Exchange(self._work / name, log, self._progress.event)

    def _carry_over(self, cells: Sequence[api.RunSpec]) -> dict[tuple[str, int], api.RunRecord]:
        """Records that settle launches of `cells`. Reports read records: one whose labels changed is written anew."""
        current = {c.fingerprint(): c for c in cells}
        done = {}
        latest, launches = self._store.latest(), defaultdict[str, list[api.RunRecord]](list)
        for record in latest.values():
            launches[record.fingerprint].append(record)
        for key, record in latest.items():
            cell = current.get(record.fingerprint)
            if cell is None or not is_done(record, cell) or not self._has_this_data(record):
                continue
            if not _is_of_last_batch(record, cell, launches[record.fingerprint]):
                continue
            relabelled = self._records.relabelled(record, cell)
            if relabelled is not record:
                self._store.append(relabelled)
            done[key] = record
        return done

    def _has_this_data(self, record: api.RunRecord) -> bool:
        """Whether the files that a task was made from are what the folder of data holds now."""
        if self._data is None or record.accuracy is None:
            return True
        files = record.accuracy.files.items()
        return all(is_below(name) and file_digest(self._data / name) == digest for name, digest in files)

    def _step(self, step: Step) -> None:
        """Measures and records a launch, again where others disturbed it, whatever its speed. Where its searched batch
        did not survive again, it and the repeats before it run once more with a smaller batch: the figures of a cell
        are of one batch."""
        record = self._try(step)
        for _ in range(self._extra_tries):
            if record.status != "ok" or not record.disturbed:
                break
            others = f"{step.cell.name}: others took {record.others_cpu:.0%} of the CPU"
            if self._in_vain == _IN_VAIN:
                self._progress.note(f"{others}, as in the last {_IN_VAIN} tries; it does not run again")
                break
            self._progress.note(f"{others}; it runs again")
            self._progress.added([step])
            self._in_vain += 1
            record = self._try(step)
        if record.status in _NO_MEMORY and self._batches.take_less(step.cell, record, self._launches(record)):
            again = [Step(step.cell, repeat) for repeat in sorted({r.repeat for r in self._launches(record)})]
            self._progress.added(again)
            for repeated in again:
                self._step(repeated)

    def _try(self, step: Step) -> api.RunRecord:
        """Measures and records a launch once."""
        draft = Draft(step.cell, step.repeat)
        try:
            record = self._measure(step, draft)
        except api.Refusal as exc:
            record = self._records.refused(step.cell, draft, exc)
        except KeyboardInterrupt:
            self._append(
                step, self._records.refused(step.cell, draft, api.Refusal("interrupted", "interrupted by the user"))
            )
            raise
        self._append(step, record)
        if record.status == "ok" and not record.disturbed:
            self._in_vain = 0
        return record

    def _launches(self, record: api.RunRecord) -> list[api.RunRecord]:
        """The last record of each launch of the same cell."""
        return [r for r in self._store.latest().values() if r.fingerprint == record.fingerprint]

    def _drop_repeats(self, cell: api.RunSpec, later: Sequence[Step]) -> None:
        """Tells how much shorter the run became, if `cell` will not be repeated."""
        if cell.fingerprint() in self._dropped:
            for step in later:
                if step.cell == cell:
                    self._progress.dropped(step)

    def _append(self, step: Step, record: api.RunRecord) -> None:
        self._store.append(record)
        if record.status in _NOT_REPEATED:
            self._dropped.add(record.fingerprint)
        self._progress.finished(step, record)

    def _measure(self, step: Step, draft: Draft) -> api.RunRecord:
        """Everything that leads to one record: model, batch, machine rates, launch, bounds. Raises Refusal."""
        cell = step.cell
        model = self._model(step)
        if self._digests.get(cell.fingerprint(), model.digest) != model.digest:
            raise api.HarnessError(
                f"model {cell.model.id} changed since {cell.name} was measured; --fresh measures it all"
            )
        draft.settled = self._searched(step, model)
        if _searches(cell):
            draft.notes = registry.simulator().search_notes(cell.tune, draft.settled.policy)
        draft.model = model
        try:
            registry.refuse(draft.settled, model)  # before an environment is built for it
        except api.UnsupportedError as exc:
            raise classify(exc) from exc
        if draft.settled.tune != "none" or cell.candidates:
            self._settle_batch(step, draft, model)
        draft.machine = self._machine_rates(step, model)
        self._progress.started(step, f"repeat {step.repeat + 1}/{cell.repeats}")
        launch = self._launch(draft.settled, step, model)
        if launch.status == "ok":
            draft.machine_after = self._machine_rates(step, model)
        return self._records.build(cell, draft, launch, partial(self._forecast, step))

    def _searched(self, step: Step, model: api.LocalModel) -> api.RunSpec:
        """The cell with the policy that its search finds; the cell itself where none is searched."""
        cell = step.cell
        if not _searches(cell):
            return cell
        try:
            host = self._host(step)
            return registry.simulator().search_policy(cell, model, host, registry.lengths(cell.workload))
        except api.HarnessError as exc:
            raise classify(exc) from exc

    def _settle_batch(self, step: Step, draft: Draft, model: api.LocalModel) -> None:
        """Settles the largest batch. Raises Refusal where none survives."""
        rates = partial(self._machine_rates, step, model)
        searched = self._batches.settle(step, model, self._exchange(step.cell, "environment"), rates)
        draft.tuning, draft.settings = searched.trials, searched.settings
        if searched.spec is not None:
            draft.settled = searched.spec
            return
        statuses = ", ".join(f"batch {t.gpu_batch_size}: {t.status}" for t in searched.trials)
        last = searched.trials[-1]
        status = last.status if last.status in (*_NO_MEMORY, *_NOT_REPEATED) else "skipped"
        raise api.Refusal(status, f"{_NONE_SURVIVES} ({statuses}); {last.reason}")

    def _forecast(self, step: Step, record: api.RunRecord) -> api.Forecast | None:
        """What the performance model says of a launch, by this host's profile."""
        workload, gpu = record.spec.workload, record.spec.limits.gpu
        if not self._suite.predictions:
            return None
        if workload.kind == "task" or workload.online or not registry.engine_entry(record.spec.engine).predicted or gpu:
            return None  # no model of these, so the host is not measured for one, which takes minutes
        try:
            return registry.forecaster().forecast(record, self._host(step))
        except Exception as exc:  # a measurement is kept, whatever becomes of its prediction
            self._progress.note(f"{record.spec.name}: not predicted: {exc}")
            return None

    def _host(self, step: Step) -> api.HardwareProfile:
        """The profile of this host; measured, quickly, where there is none yet. Raises HarnessError."""

        def measure() -> None:
            self._progress.started(step, "measuring this host, once")
            self._launcher.calibrate(self._exchange(step.cell, "calibrate"))

        return self._profile.get(measure)

    def _launch(self, spec: api.RunSpec, step: Step, model: api.LocalModel) -> api.LaunchResult:
        if model.path:
            try:
                registry.model_store().evict(model.path)
            except OSError as exc:
                reason = f"cannot read {exc.filename or 'the model'}: {exc.strerror}; make it readable"
                return api.LaunchResult("error", self._launcher.scrub(reason), provenance.now())
        exchange = self._exchange(spec, f"{spec.name}-{step.repeat}")
        return self._launcher.launch(api.LaunchRequest(spec, step.repeat, model, exchange, self._data))

    def _model(self, step: Step) -> api.LocalModel:
        """The cell's model on this machine, made ready once. Raises Refusal, the same every time."""
        engine, spec = step.cell.engine, step.cell.model
        key = (registry.engine_entry(engine).builtin_model, spec)
        if key not in self._models:
            self._progress.started(step, f"preparing {spec.id}")
            try:
                self._models[key] = self._launcher.prepare(engine, spec, self._exchange(step.cell, "prepare"))
            except api.Refusal as exc:
                self._models[key] = exc
        model = self._models[key]
        if isinstance(model, api.Refusal):
            raise model
        return model

    def _machine_rates(self, step: Step, model: api.LocalModel) -> api.MachineRates | None:
        """Rates measured at most a minute ago, so that they drift with what they bound."""
        if not self._suite.machine_probe or not model.path:
            return None
        cell = step.cell
        gpu = cell.limits.gpu
        key = (model.path, cell.limits.threads, gpu)
        read_at, rates = self._machine.get(key, (float("-inf"), None))
        if time.monotonic() - read_at > _MACHINE_PROBE_MAX_AGE_S:
            self._progress.started(step, "measuring disk and GEMM rates")
            with contextlib.suppress(OSError):  # the launch will say that the model cannot be read
                registry.model_store().evict(model.path)
            dtypes = {d for c in self._suite.cells for d in (
                c.policy.compute_dtype, *c.candidates.get("policy.compute_dtype", ())
            )}  # fmt: skip
            exchange = self._exchange(cell, "machine")
            rates = self._launcher.measure_machine(model, dtypes, cell.limits, exchange)
            self._machine[key] = (time.monotonic(), rates)
        return rates


def _is_of_last_batch(record: api.RunRecord, cell: api.RunSpec, launches: Sequence[api.RunRecord]) -> bool:
    """Whether a launch of a cell whose batch or settings were searched ran with those that its last one ran with, and
    did not fail for want of memory: a run that ended while others were tried goes on with them."""
    if cell.tune != "max_batch" and not cell.candidates:
        return True
    if record.status in _NO_MEMORY:
        return record.reason.startswith(_NONE_SURVIVES)
    last = max((r for r in launches if r.status == "ok"), key=lambda r: r.started_at, default=record)
    return record.status != "ok" or _batch_of(record) == _batch_of(last)


def _batch_of(record: api.RunRecord) -> tuple[int | None, Mapping[str, object]]:
    return record.load.policy.gpu_batch_size if record.load else None, record.settings


def _searches(cell: api.RunSpec) -> bool:
    """Whether the performance model chooses the cell's policy."""
    return cell.tune.startswith("search")
