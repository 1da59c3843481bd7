"""Chooses the batch of cells with `policy: max_batch`, by a new or remembered search, and lowers it after failures."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.api import Exchange, LaunchResult, LocalModel, Refusal, RunRecord, RunSpec, Trial
from harness.launchers.launcher import CellLauncher
from harness.launchers.memory import cap_method
from harness.run.progress import Progress
from harness.run.steps import Step
from harness.run.tuning import CEILING, Patience, Remembered, choose, lasting, search_max_batch, settled


@dataclass(frozen=True)
class Settled:
    """A cell with its searched batch (None if no batch survives), the search's trials, and their key in the cache."""

    spec: RunSpec | None
    trials: tuple[Trial, ...]
    key: str


@dataclass
class Batches:
    """The searched batches of a run, by a cell's fingerprint in `settled`. `launch` launches a cell whose batch is set,
    for a step and a model."""

    launcher: CellLauncher
    remembered: Remembered
    launch: Callable[[RunSpec, Step, LocalModel], LaunchResult]
    progress: Progress
    settled: dict[str, Settled] = field(default_factory=dict)

    def settle(self, step: Step, model: LocalModel, exchange: Exchange) -> Settled:
        """The cell with its batch, or the failed trials; a single failed trial if the engine has no environment."""
        cell = step.cell
        if cell.fingerprint() not in self.settled:
            try:
                versions = self.launcher.environment(cell, exchange)
            except Refusal as exc:
                return Settled(None, (Trial(cell.policy.gpu_batch_size, exc.status, None, exc.reason),), "")
            key = self.remembered.key(cell, versions, model.digest, cap_method())
            trials = self.remembered.get(key)
            if trials is None:
                requests = cell.workload.num_requests
                ceiling = CEILING if requests == "auto" else min(CEILING, requests)
                trials = self._search(step, model, cell.policy.gpu_batch_size, ceiling)
            self._take(cell, trials, key)
        known = self.settled[cell.fingerprint()]
        if known.spec is None and any(t.status == "ok" for t in known.trials):
            # every batch that survived once failed later: search once more, below the smallest that failed
            smallest = min(t.gpu_batch_size for t in known.trials if t.status != "ok")
            self._take(cell, (*known.trials, *self._search(step, model, smallest // 2, smallest - 1)), known.key)
        return self.settled[cell.fingerprint()]

    def take_less(self, cell: RunSpec, record: RunRecord) -> bool:
        """Takes a smaller batch for a cell whose searched batch failed in a repeat. Returns whether one remains."""
        old = self.settled.get(cell.fingerprint())
        if old is None or old.spec is None:
            return False
        batch = old.spec.policy.gpu_batch_size
        failed = Trial(batch, record.status, None, f"in repeat {record.repeat + 1}: {record.reason}")
        self._take(cell, (*old.trials, failed), old.key)
        self.progress.note(f"{cell.name}: batch {batch} did not survive again; a smaller one is taken")
        return self.settled[cell.fingerprint()].spec is not None or batch > 1

    def _take(self, cell: RunSpec, trials: tuple[Trial, ...], key: str) -> None:
        """Takes the best batch of `trials`, and remembers them if the result can be reused."""
        batch = choose(trials)
        self.settled[cell.fingerprint()] = Settled(None if batch is None else settled(cell, batch), trials, key)
        if lasting(trials):
            self.remembered.put(key, trials)

    def _search(self, step: Step, model: LocalModel, start: int, ceiling: int) -> tuple[Trial, ...]:
        patience = Patience(step.cell.timeout_s)

        def attempt(batch: int) -> Trial:
            self.progress.started(step, f"searching the largest batch: {batch}")
            cell = replace(settled(step.cell, batch), timeout_s=patience.seconds(batch))
            launch = self.launch(cell, step, model)
            speed = None
            if launch.status == "ok":
                patience.learn(batch, launch.wall_s)
                speed = launch.measured.metrics.get("generation_throughput_tok_s")
            rate = f", {speed:.3g} tok/s" if speed else ""
            self.progress.note(f"{step.cell.name}: batch {batch}: {launch.status}{rate}")
            return Trial(batch, launch.status, speed, launch.reason)

        return search_max_batch(start, attempt, ceiling)
