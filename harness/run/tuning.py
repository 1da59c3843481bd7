"""`policy: max_batch` and `candidates`: the batch and settings that make an engine fastest, searched once a machine."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.api import HarnessError, MachineRates, RunSpec, Trial, from_json, to_json
from harness.common.files import replace_with
from harness.common.locks import waiting
from harness.common.regular_file import read_kept

CEILING = 4096
#: Below this fraction of a smaller batch's throughput, a larger batch is past the optimum.
_PAYS = 0.9
#: A trial's timeout: this factor on the time expected from the trial before, and this many seconds of start-up.
_THRASHING, _STARTUP_S = 1.5, 60.0
#: What an engine computes in, as a setting; and the share of another's rate below which a dtype is not worth a try.
_DTYPE, _HOPELESS = "policy.compute_dtype", 0.5
#: Statuses of trials whose outcome depends on the batch size only.
SIZE_STATUSES = ("ok", "oom_host", "oom_device", "timeout", "infeasible")


def search_max_batch(
    start: int, attempt: Callable[[int], Trial], ceiling: int = CEILING, beats: float = 0.0
) -> tuple[Trial, ...]:
    """Doubles (or halves) from `start` until survival changes, then bisects to a step of at most a quarter.

    `attempt(batch)` launches the cell with that batch, once per batch and never above `ceiling`, such as the number of
    requests. The search assumes that survival is monotone in the batch. It stops if a larger batch survives but is
    clearly slower than a smaller one, if a trial fails for a reason other than size, and if no batch up to the ceiling
    can reach `beats` (tok/s): throughput grows with the batch at most in proportion.
    """
    trials: list[Trial] = []
    largest_ok, smallest_failed, batch = 0, 0, min(start, ceiling)
    while batch:
        trials.append(attempt(batch))
        status = trials[-1].status
        if status not in SIZE_STATUSES or (status == "ok" and _is_slower(trials)):
            break
        if status == "ok" and (trials[-1].throughput_tok_s or 0.0) * (smallest_failed or ceiling) < beats * batch:
            break
        if status == "ok":
            largest_ok = batch
        else:
            smallest_failed = batch
        if not smallest_failed:
            batch = min(2 * largest_ok, ceiling) if largest_ok < ceiling else 0
        elif not largest_ok:
            batch = smallest_failed // 2
        else:
            wide = smallest_failed - largest_ok > max(1, largest_ok // 4)
            batch = (largest_ok + smallest_failed) // 2 if wide else 0
    return tuple(trials)


@dataclass
class Patience:
    """Timeouts for the trials of a batch search, at most `longest` seconds each, from the `last` batch and its seconds.

    A batch that takes far longer per sequence than the batch before it thrashes: its trial should end long before the
    cell's timeout.
    """

    longest: float
    last: tuple[int, float] | None = None

    def seconds(self, batch: int) -> float:
        """The timeout of a trial of `batch`. A smaller batch than the last gets no less, as start-up dominates."""
        if self.last is None:
            return self.longest
        last_batch, wall_s = self.last
        return min(self.longest, _THRASHING * wall_s * max(1.0, batch / last_batch) + _STARTUP_S)

    def learn(self, batch: int, wall_s: float) -> None:
        """Records that a trial of `batch` survived and took `wall_s` seconds."""
        self.last = (batch, wall_s)


def _is_slower(trials: Sequence[Trial]) -> bool:
    """Whether the last trial has the largest batch and less throughput than another, by more than launches vary."""
    speeds = [t.throughput_tok_s or 0.0 for t in trials if t.status == "ok"]
    largest = trials[-1].gpu_batch_size == max(t.gpu_batch_size for t in trials)
    return largest and speeds[-1] < _PAYS * max(speeds)


def search_settings(
    cell: RunSpec, start: int, attempt: Callable[[Mapping[str, Any], int], Trial], ceiling: int = CEILING
) -> tuple[Trial, ...]:
    """Searches the batch with the cell's own settings, then tries its candidates. `attempt(settings, batch)` launches.

    Each value of `cell.candidates` is launched once, in the cell's order, beside the best settings so far and at their
    batch; where that does not survive, at smaller ones, as long as one can still be the fastest. Larger batches are not
    tried again: a cell's own settings should be those that need least memory. Without `tune: max_batch` the batch is
    `start`, or one of the candidates.
    """

    def searched(settings: Mapping[str, Any], first: int, most: int, beats: float) -> tuple[Trial, ...]:
        if cell.tune != "max_batch":
            return (attempt(settings, first),)
        return search_max_batch(first, partial(attempt, settings), most, beats)

    trials = [*searched({}, start, ceiling, 0.0)]
    for path, values in cell.candidates.items():
        for value in values:
            best = choose(trials)
            if best is None:
                return tuple(trials)
            if path == "policy.gpu_batch_size":  # of a cell that searches none
                trials.append(attempt(best.settings, value))
                continue
            settings = {**best.settings, path: value}
            settings = {key: v for key, v in settings.items() if cell.with_settings({key: v}) != cell}
            if all(t.settings != settings for t in trials):
                most = best.gpu_batch_size
                trials += searched(settings, most, most, best.throughput_tok_s or 0.0)
    return tuple(trials)


def without_slow_dtypes(
    cell: RunSpec, stored: str, rates: Callable[[], MachineRates | None]
) -> tuple[tuple[Trial, ...], RunSpec]:
    """The cell without those of its candidates in which this machine cannot compute fast enough to be chosen, and a
    trial of each that was not made.

    A candidate dtype is out where it multiplies at less than half of the rate of the cell's own (`stored`, where it
    names none), by as many rows as the cell's batch has or more: products are most of such a launch.
    """
    given = cell.candidates.get(_DTYPE, ())
    if not given or (measured := rates()) is None:
        return (), cell
    own = stored if cell.policy.compute_dtype == "auto" else cell.policy.compute_dtype
    slow = [dtype for dtype in given if _is_hopeless(measured, dtype, own, cell.policy.gpu_batch_size)]
    kept = {**cell.candidates, _DTYPE: tuple(dtype for dtype in given if dtype not in slow)}
    reason = f"not tried: it multiplies at less than {_HOPELESS:.0%} of the rate of {own} here"
    trials = tuple(Trial(cell.policy.gpu_batch_size, "skipped", None, reason, {_DTYPE: dtype}) for dtype in slow)
    return trials, replace(cell, candidates={path: values for path, values in kept.items() if values})


def _is_hopeless(measured: MachineRates, dtype: str, beside: str, batch: int) -> bool:
    slow, fast = (measured.gemm_flops.get(name, {}) for name in (dtype, beside))
    rows = [count for count in slow if int(count) >= batch and slow[count] and fast.get(count)]
    return bool(rows) and all(max(slow[count]) < _HOPELESS * max(fast[count]) for count in rows)


def choose(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the batch and settings to run: the fastest that never failed; of equals, the largest batch. None if
    all failed."""
    failed = [(t.settings, t.gpu_batch_size) for t in trials if t.status != "ok"]
    survivors = [t for t in trials if (t.settings, t.gpu_batch_size) not in failed]
    return max(survivors, key=lambda t: (t.throughput_tok_s or 0.0, t.gpu_batch_size), default=None)


def lasting(trials: Sequence[Trial]) -> bool:
    """Whether a search's result can be reused: only sizes decided, and either a batch survived or none can ever fit.
    Other failures of all trials, such as a missing compiler or a busy machine, can be repaired; a candidate that the
    engine does not support is one that lost."""
    statuses = {t.status for t in trials if not (t.settings and t.status in ("unsupported", "skipped"))}
    return statuses <= {*SIZE_STATUSES} and (choose(trials) is not None or statuses == {"infeasible"})


@dataclass(frozen=True)
class Remembered:
    """Earlier searches on this machine, in one JSON file of the cache that is replaced atomically."""

    path: Path
    machine_key: str

    def key(self, spec: RunSpec, versions: Mapping[str, str], model_digest: str, cap: str) -> str:
        """The key of a search, over all it depends on: machine, cell without labels, packages, weights, memory cap."""
        parts = [self.machine_key, spec.fingerprint(), spec.timeout_s, sorted(versions.items()), model_digest, cap]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def get(self, key: str) -> tuple[Trial, ...] | None:
        """The trials of an earlier search, or None."""
        with contextlib.suppress(HarnessError):
            return from_json(tuple[Trial, ...], read_kept(self.path).get(key)) or None
        return None

    def put(self, key: str, trials: Sequence[Trial]) -> None:
        """Stores a search's trials. A cache that cannot be written is ignored: it costs a search, not the run."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with waiting(self.path.with_suffix(".lock"), "another search's result to be stored"):
                replace_with(
                    self.path, json.dumps(read_kept(self.path) | {key: [to_json(t) for t in trials]}, indent=1)
                )


def settled(spec: RunSpec, batch: int, settings: Mapping[str, Any]) -> RunSpec:
    """The cell with the batch and the candidates that its search chose."""
    chosen = spec.with_settings({**settings, "policy.gpu_batch_size": batch})
    return replace(chosen, tune="none", candidates={})
