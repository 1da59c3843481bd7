"""`policy: max_batch`: the largest batch an engine survives under its limit, searched once a machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.api import HarnessError, RunSpec, Trial, from_json, to_json
from harness.common.files import replace_with

CEILING = 4096
#: A larger batch this much slower than a smaller one is past the best.
_PAYS = 0.9
#: A trial may take so many times what the one before makes expect, and this many seconds more.
_THRASHING, _STARTUP_S = 1.5, 60.0
#: How a trial ends if only the batch's size decided.
SIZE_STATUSES = ("ok", "oom_host", "oom_device", "timeout", "infeasible")


def search_max_batch(start: int, attempt: Callable[[int], Trial], ceiling: int = CEILING) -> tuple[Trial, ...]:
    """Doubles (or halves) from `start` until survival changes, then bisects to a step of at most a quarter.

    It stops going up where a larger batch is clearly slower than a smaller one: it survives, but it does not pay.

    No batch above `ceiling`, such as the number of requests there are, is tried.

    `attempt(batch)` launches the cell with that batch. Survival is taken to be monotone. Each batch is tried once.
    A trial that failed for another reason than size ends the search.
    """
    trials: list[Trial] = []

    def survives(batch: int) -> bool:
        trials.append(attempt(batch))
        return trials[-1].status == "ok"

    good, bad = 0, 0
    batch = min(start, ceiling)
    while not (good and bad) and batch >= 1 and good < ceiling:
        if survives(batch):
            if _pays_no_more(trials):
                return tuple(trials)
            good, batch = batch, min(batch * 2, ceiling)
        else:
            bad, batch = batch, batch // 2
        if trials[-1].status not in SIZE_STATUSES:
            return tuple(trials)
    while good and bad and bad - good > max(1, good // 4):
        middle = (good + bad) // 2
        if survives(middle):
            good = middle
        else:
            bad = middle
        if trials[-1].status not in SIZE_STATUSES:
            break
    return tuple(trials)


class Patience:
    """How long a trial of a batch search may take: of each launch, at most `longest` seconds.

    A batch that takes far longer a sequence than the one before it thrashes, which is no way to survive and pays for
    nothing: its trial ends long before the cell's own timeout.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last: tuple[int, float] | None = None

    def seconds(self, batch: int) -> float:
        """For a trial of this batch. A smaller one may take as long as a larger that was done: most is start-up."""
        if self._last is None:
            return self._longest
        done, wall_s = self._last
        return min(self._longest, _THRASHING * wall_s * max(1.0, batch / done) + _STARTUP_S)

    def learn(self, batch: int, wall_s: float) -> None:
        """A trial of this batch survived and took so long."""
        self._last = (batch, wall_s)


def _pays_no_more(trials: Sequence[Trial]) -> bool:
    """Whether the last trial, of the largest batch, gave less than another by more than launches differ."""
    speeds = [t.throughput_tok_s or 0.0 for t in trials if t.status == "ok"]
    largest = trials[-1].gpu_batch_size == max(t.gpu_batch_size for t in trials)
    return largest and speeds[-1] < _PAYS * max(speeds)


def choose(trials: Sequence[Trial]) -> int | None:
    """The batch to run: the fastest that always survived, nearly always the largest; None if none did."""
    failed = {t.gpu_batch_size for t in trials if t.status != "ok"}
    alive = [t for t in trials if t.gpu_batch_size not in failed]
    if not alive:
        return None
    return max(alive, key=lambda t: (t.throughput_tok_s or 0.0, t.gpu_batch_size)).gpu_batch_size


def lasting(trials: Sequence[Trial]) -> bool:
    """Whether a search need not be done again: only sizes decided, and some survived or none can ever fit. What else
    ends all trials, such as a missing compiler or a busy machine, may be mended."""
    statuses = {t.status for t in trials}
    return statuses <= {*SIZE_STATUSES} and (choose(trials) is not None or statuses == {"infeasible"})


@dataclass(frozen=True)
class _Trials:
    """The stored form of one search."""

    trials: tuple[Trial, ...] | None


class Remembered:
    """Searches that were done on this machine: one JSON file in the cache, replaced atomically."""

    def __init__(self, path: Path, machine_key: str) -> None:
        self._path = path
        self._machine_key = machine_key

    def key(self, spec: RunSpec, versions: Mapping[str, str], model_digest: str, cap: str) -> str:
        """What a search depends on: machine, cell (less labels and repeats), packages, weights, kind of cap."""
        parts = [self._machine_key, spec.fingerprint(), spec.timeout_s, sorted(versions.items()), model_digest, cap]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def get(self, key: str) -> tuple[Trial, ...] | None:
        """The trials of an earlier search, or None."""
        with contextlib.suppress(HarnessError):
            return from_json(_Trials, {"trials": self._read().get(key)}).trials or None
        return None

    def put(self, key: str, trials: Sequence[Trial]) -> None:
        """Keeps a search's trials, if the cache can be written: forgetting costs a search, failing a run."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                replace_with(self._path, json.dumps(self._read() | {key: [to_json(t) for t in trials]}, indent=1))

    def _read(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._path.read_text())
            if isinstance(content, dict):
                return content
        return {}


def settled(spec: RunSpec, batch: int) -> RunSpec:
    """The cell with its searched batch in place of the search."""
    return replace(spec, policy=replace(spec.policy, gpu_batch_size=batch), tune="none")
