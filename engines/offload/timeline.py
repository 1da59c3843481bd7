"""Spans of what ran when in a pass, by lane; sums over passes; and the fullest pass, kept for a trace."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

from harness.api import EngineTrace, TraceEvent
from harness.common.intervals import union_length

#: Lanes from top to bottom: weights, KV blocks and activations from and to disk. Attention runs inside compute; a wait
#: is compute that stalls for a load. With a device the host may attend beside it, and multiply experts.
LANES = ("load", "cache", "activations", "wait", "compute", "attention", "host attention", "host experts")
#: Spans of the compute lane other than products: a batch runs on to its next product, or waits for its attention.
BETWEEN, AWAITING = "between products", "waits for attention"
#: The span of the wait lane that is no stall for a load: a rank waits for the one before it.
STAGE_BEFORE = "for the stage before"
#: The tasks that a device's clock times. While the device computes the host idles and loads wait for slots, so their
#: times would not tell how busy the disk or the link is.
_TIMED = ("task_products", "task_attention", "task_other")
_SHORTEST_S = 1e-4
#: Spans of one name are merged where no more time than this lies between them.
_GAP_S = 1e-3


#: A span whose times may still be a device's stamps.
_Untimed = tuple[str, str, Any, Any]


class Span(NamedTuple):
    """Something that ran in a lane; times on the clock of `time.perf_counter`. A pass of one row has hundreds."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PassSums:
    """What one pass adds to the sums of a timeline. `compute_s`: from its first computation to its last one; `idle_s`:
    before it and at its end, when nothing computed."""

    rows: int
    wait_s: float
    load_s: float
    tasks: Mapping[str, float]
    compute_s: float
    idle_s: float


class Clock(Protocol):
    """The clock of a device, whose stamps get their times once the device has reached them."""

    def stamp(self) -> Any:
        """A point in the work that this thread has enqueued."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """When the device reached each, on the clock of `time.perf_counter`; blocks until it has."""


class Timeline:
    """Spans of the current pass, sums by lane over all passes, and the spans of the fullest pass.

    Where several passes are `under_way` at a time, so many are kept: the fullest one and those that ended before it.
    Spans may be added from any thread: appending to a list is atomic. A device's work is timed by its `clock`, through
    `now`: the host runs on before the work is done.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        #: The time at which the next work begins, for `add`.
        self.now: Callable[[], Any] = time.perf_counter if clock is None else clock.stamp
        self.under_way = 1
        self.clear()

    def clear(self) -> None:
        """Forgets all passes."""
        self._spans: list[_Untimed] = []
        self._idle_s = 0.0
        self._ended: Any = None  # where the last `end` was
        self._computed_s: float | None = None  # when the last pass had its logits, if somebody waits for the next one
        self._closed: list[tuple[int, list[_Untimed], float]] = []  # passes: rows, spans, idle seconds
        self._most_rows = -1
        self._last: deque[Sequence[Span]] = deque(maxlen=self.under_way)
        self.kept: tuple[Span, ...] = ()
        self.passes = self.rows = self.prefix_hit_tokens = 0
        self.wait_s = self.load_s = self.compute_s = self.idle_s = 0.0
        self.tasks: dict[str, float] = {}

    def add(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Adds a span; times are of `time.perf_counter` or of `now`."""
        self._spans.append((lane, name, start, end))

    def begin(self) -> Any:
        """When work begins that is asked for next, for `end`: now, or on a device where the last work's `end` was, as
        it goes from one to the next and each stamp costs the host as much as a launch."""
        if self._clock is None or self._ended is None:
            self._ended = self.now()
        return self._ended

    def end(self, lane: str, name: str, began: Any) -> None:
        """Adds a span from `began` to now."""
        self._ended = self.now()
        self.add(lane, name, began, self._ended)

    def begin_pass(self) -> None:
        """Computing begins. Since the last pass nothing computed, though somebody waited unless `rest` was called."""
        if self._computed_s is not None:
            self.add_idle(time.perf_counter() - self._computed_s)
        self._ended = None
        self.rest()

    def rest(self) -> None:
        """Nobody waits for the next pass."""
        self._computed_s = None

    def add_idle(self, seconds: float) -> None:
        """For so long nothing computed, before this pass or at its end."""
        self._idle_s += seconds

    def close_pass(self, rows: int) -> None:
        """A pass of `rows` tokens has computed its logits. `settle` sums it up, when there is time."""
        self._closed.append((rows, self._spans, self._idle_s))
        self._spans, self._idle_s, self._computed_s = [], 0.0, time.perf_counter()

    def settle(self) -> list[PassSums]:
        """Sums up the passes that were closed; the one with the most rows, a later one among equals, is kept."""
        closed, self._closed = self._closed, []
        return [self._sum_up(*each) for each in closed]

    def end_pass(self, rows: int) -> PassSums:
        """Closes a pass of `rows` tokens and sums it up."""
        self.close_pass(rows)
        return self.settle()[-1]

    def _sum_up(self, rows: int, untimed: Sequence[_Untimed], idle_s: float) -> PassSums:
        spans = self._timed(untimed)
        self._last.append(spans)
        if rows >= self._most_rows:
            self._most_rows = rows
            self.kept = tuple(chain(*self._last))
        lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
        for span in spans:
            lanes[span.lane].append(span)
        first, last = _window(lanes["compute"])
        sums = PassSums(
            rows,
            sum(s.end_s - s.start_s for s in lanes["wait"] if s.name != STAGE_BEFORE),
            union_length((s.start_s, s.end_s) for s in [*lanes["load"], *lanes["cache"]]),
            {task: s for task, s in _tasks(lanes).items() if self._clock is None or task in _TIMED},
            last - first,
            idle_s,
        )
        self.count(sums)
        return sums

    def _timed(self, spans: Sequence[_Untimed]) -> list[Span]:
        if self._clock is None:
            return [*map(Span._make, spans)]
        stamps = [t for span in spans for t in span[2:] if not isinstance(t, float)]
        seconds = iter(self._clock.seconds(stamps))
        return [
            Span(lane, name, *(t if isinstance(t, float) else next(seconds) for t in times))
            for lane, name, *times in spans
        ]

    def count(self, sums: PassSums) -> None:
        """Adds a pass to the sums."""
        self.passes += 1
        self.rows += sums.rows
        self.wait_s += sums.wait_s
        self.load_s += sums.load_s
        self.compute_s += sums.compute_s
        self.idle_s += sums.idle_s
        for task, seconds in sums.tasks.items():
            self.tasks[task] = self.tasks.get(task, 0.0) + seconds

    @property
    def window(self) -> tuple[float, float]:
        """When the first kept span began and the last one ended."""
        return _window(self.kept)

    def trace(self) -> EngineTrace:
        """Sums over all passes, and the kept pass with neighbouring spans of one name merged."""
        metrics = {
            "passes": float(self.passes),
            "rows_per_pass": self.rows / self.passes if self.passes else 0.0,
            "shared_prompt_tokens": float(self.prefix_hit_tokens),
            **{f"{task}_s": seconds for task, seconds in self.tasks.items()},
        }
        if self.idle_s:
            metrics |= {"between_passes_s": self.idle_s, "between_passes_share": self.idle_s / self.compute_s}
        if self._clock is None:
            metrics |= {"disk_busy_s": self.load_s, "disk_wait_s": self.wait_s}
            if self.load_s:
                metrics["disk_hidden"] = max(0.0, 1.0 - self.wait_s / self.load_s)
        merged = [s for lane in LANES for s in _merged(s for s in self.kept if s.lane == lane)]
        origin, _ = self.window
        return EngineTrace(metrics, tuple(_event(s, origin) for s in merged if s.end_s - s.start_s >= _SHORTEST_S))


def _window(spans: Sequence[Span]) -> tuple[float, float]:
    return min((s.start_s for s in spans), default=0.0), max((s.end_s for s in spans), default=0.0)


def _tasks(lanes: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Seconds in which each task was at work, by FlexGen's breakdown (table 8); overlapping time counts for both."""

    def times(lane: str, *names: str, but: tuple[str, ...] = ()) -> list[tuple[float, float]]:
        return [s[2:] for s in lanes[lane] if s.name.startswith(names or ("",)) and s.name not in but]

    attention, between = times("attention"), times("compute", BETWEEN)
    products = times("compute", but=(BETWEEN, AWAITING))
    # what may lie inside the spans between products; a batch that is alone does not stop for each of its own
    nested = [*attention, *times("wait"), *times("activations"), *products]
    other = union_length([*nested, *between]) - union_length(nested)
    return {
        "task_load_weights": union_length(times("load")),
        "task_load_cache": union_length(times("cache", "read")),
        "task_store_cache": union_length(times("cache", "write")),
        "task_move_activations": union_length(times("activations")),
        "task_products": union_length(products),
        "task_attention": union_length(attention),
        "task_other": other,
        "task_waiting": union_length([*times("wait"), *times("compute", AWAITING)]),
    }


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans of one lane in order; spans of the same name that follow each other closely are merged."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if merged and merged[-1].name == span.name and span.start_s - merged[-1].end_s <= _GAP_S:
            merged[-1] = merged[-1]._replace(end_s=max(merged[-1].end_s, span.end_s))
        else:
            merged.append(span)
    return merged


def _event(span: Span, origin: float) -> TraceEvent:
    start, length = (span.start_s - origin) * 1e6, (span.end_s - span.start_s) * 1e6
    return TraceEvent(span.name, span.lane, round(start, 1), round(length, 1), LANES.index(span.lane))
