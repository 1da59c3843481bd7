"""Chooses the batch and settings of searched cells, by a new or remembered search, and others after failures."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.api import Exchange, LaunchResult, LocalModel, MachineRates, Refusal, RunRecord, RunSpec, Trial
from harness.api.record import DISTURBED, others_cpu
from harness.launchers.launcher import CellLauncher
from harness.launchers.memory import cap_method
from harness.run.progress import Progress
from harness.run.steps import Step
from harness.run.tuning import (
    CEILING,
    Patience,
    Remembered,
    choose,
    lasting,
    search_settings,
    settled,
    without_slow_dtypes,
)

#: Launches of a trial at most: another where others disturbed the first.
_TRIES = 2


@dataclass(frozen=True)
class Settled:
    """A cell with its searched batch and settings (None if no batch survives), the candidates among them, the search's
    trials, and their key in the cache."""

    spec: RunSpec | None
    settings: Mapping[str, Any]
    trials: tuple[Trial, ...]
    key: str


@dataclass
class Batches:
    """The searched batches and settings of a run, by a cell's fingerprint in `settled`. `launch` launches a cell whose
    batch is set, for a step and a model."""

    launcher: CellLauncher
    remembered: Remembered
    launch: Callable[[RunSpec, Step, LocalModel], LaunchResult]
    progress: Progress
    settled: dict[str, Settled] = field(default_factory=dict)

    def settle(
        self, step: Step, model: LocalModel, exchange: Exchange, rates: Callable[[], MachineRates | None]
    ) -> Settled:
        """The cell with its batch, or the failed trials; a single failed trial if the engine has no environment.
        `rates` measures the machine where a search may be spared some trials by that."""
        cell = step.cell
        if cell.fingerprint() not in self.settled:
            try:
                versions = self.launcher.environment(cell, exchange)
            except Refusal as exc:
                return Settled(None, {}, (Trial(cell.policy.gpu_batch_size, exc.status, None, exc.reason),), "")
            key = self.remembered.key(cell, versions, model.digest, cap_method())
            trials = self.remembered.get(key)
            if trials is None:
                requests = cell.workload.num_requests
                ceiling = CEILING if requests == "auto" else min(CEILING, requests)
                trials = self._search(step, model, rates, cell.policy.gpu_batch_size, ceiling)
            self._take(cell, trials, key)
        known = self.settled[cell.fingerprint()]
        if known.spec is None and cell.tune == "max_batch" and any(t.status == "ok" for t in known.trials):
            # every batch that survived once failed later: search once more, below the smallest that failed
            smallest = min(t.gpu_batch_size for t in known.trials if t.status != "ok" and not t.settings)
            self._take(cell, (*known.trials, *self._search(step, model, rates, smallest // 2, smallest - 1)), known.key)
        return self.settled[cell.fingerprint()]

    def take_less(self, cell: RunSpec, record: RunRecord, earlier: Sequence[RunRecord]) -> bool:
        """Takes a smaller batch, or other settings, for a cell whose searched ones failed in a repeat. Returns whether
        any remain. `earlier`: the cell's other launches; those of the same batch and settings join the trials, which
        then show how often it survives."""
        old = self.settled.get(cell.fingerprint())
        if old is None or old.spec is None:
            return False
        batch = old.spec.policy.gpu_batch_size
        alike = [
            r for r in earlier
            if r.status == "ok" and r.settings == old.settings and r.load and r.load.policy.gpu_batch_size == batch
        ]  # fmt: skip
        launches = [Trial(batch, r.status, _speed(r.metrics), "a repeat", old.settings) for r in alike]
        failed = Trial(batch, record.status, None, f"in repeat {record.repeat + 1}: {record.reason}", old.settings)
        self._take(cell, (*old.trials, *launches, failed), old.key)
        self.progress.note(f"{cell.name}: batch {batch} did not survive again; a smaller one is taken")
        return self.settled[cell.fingerprint()].spec is not None or (cell.tune == "max_batch" and batch > 1)

    def _take(self, cell: RunSpec, trials: tuple[Trial, ...], key: str) -> None:
        """Takes the best of `trials`, and remembers them if the result can be reused."""
        best = choose(trials)
        chosen = None if best is None else settled(cell, best.gpu_batch_size, best.settings)
        self.settled[cell.fingerprint()] = Settled(chosen, best.settings if best else {}, trials, key)
        if lasting(trials):
            self.remembered.put(key, trials)

    def _search(
        self, step: Step, model: LocalModel, rates: Callable[[], MachineRates | None], start: int, ceiling: int
    ) -> tuple[Trial, ...]:
        spared, searched = without_slow_dtypes(step.cell, model.dtype, rates)
        for trial in spared:
            self.progress.note(f"{step.cell.name}: {trial.settings}: {trial.reason}")
        # for each setting anew: the first launch of one may convert the weights
        patiences = defaultdict[str, Patience](lambda: Patience(step.cell.timeout_s))

        def attempt(settings: Mapping[str, Any], batch: int) -> Trial:
            patience = patiences[str(settings)]
            tried = ", ".join([f"batch {batch}", *(f"{path.partition('.')[2]} {v}" for path, v in settings.items())])
            self.progress.started(step, f"searching: {tried}")
            cell = replace(settled(step.cell, batch, settings), timeout_s=patience.seconds(batch))
            speed = None
            for _ in range(_TRIES):
                launch = self.launch(cell, step, model)
                if launch.status != "ok":
                    break
                patience.learn(batch, launch.wall_s)
                speed = max(filter(None, (speed, _speed(launch.measured.metrics))), default=None)
                if others_cpu(launch.measured.measurements) <= DISTURBED:
                    break
            rate = f", {speed:.3g} tok/s" if speed else ""
            self.progress.note(f"{step.cell.name}: {tried}: {launch.status}{rate}")
            return Trial(batch, launch.status, speed, launch.reason, settings)

        return (*spared, *search_settings(searched, start, attempt, ceiling))


def _speed(metrics: Mapping[str, float | None]) -> float | None:
    """What trials are compared by, in token/s: generated, or of a task that generates nothing scored."""
    return metrics.get("generation_throughput_tok_s") or metrics.get("score_throughput_tok_s")
