"""What a rank does when: spans of computing, waiting and sending, what they add up to, and their events in a trace."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from harness.api import TraceEvent

#: A rank's thread runs its layers, waits for what the stage before sends, or hands on what it computed. The transfer
#: itself goes on beside.
COMPUTE, WAIT, SEND = range(3)
_NAMES = ("compute", "wait", "send")
#: Spans that are kept, those of the latest passes: a few megabytes.
_MOST = 1 << 16


class LaneSpan(NamedTuple):
    """Something of a `kind` that a rank did; times on its clock of `time.perf_counter`."""

    kind: int
    start_s: float
    end_s: float


class Lane:
    """One rank's spans since a run began, and its seconds at work. Spans follow each other."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins another run."""
        self._spans: deque[LaneSpan] = deque(maxlen=_MOST)
        self.busy_s = 0.0
        self._began: float | None = None
        self._ended = 0.0

    def add(self, kind: int, start_s: float, end_s: float) -> None:
        """Adds a span."""
        self._spans.append(LaneSpan(kind, start_s, end_s))
        if kind != WAIT:
            self.busy_s += end_s - start_s
        self._began = start_s if self._began is None else self._began
        self._ended = end_s

    @property
    def seconds(self) -> float:
        """From the start of the first span to the end of the last."""
        return 0.0 if self._began is None else self._ended - self._began

    def within(self, low: float, high: float) -> list[LaneSpan]:
        """The kept spans between two times, cut off there."""
        return [
            LaneSpan(kind, max(start, low), min(end, high))
            for kind, start, end in self._spans
            if start < high and end > low
        ]


def events(rank: int, spans: Iterable[LaneSpan], origin: float) -> list[TraceEvent]:
    """Spans as events of the rank's lane; `origin` is the time, on the same clock, that the trace calls 0."""
    return [
        TraceEvent(
            _NAMES[span.kind], f"rank {rank}", round((span.start_s - origin) * 1e6, 1),
            round((span.end_s - span.start_s) * 1e6, 1), rank, rank + 1,
        )
        for span in spans
    ]  # fmt: skip


def metrics(rank: int, busy_s: float, run_s: float) -> dict[str, float]:
    """Of a run of `run_s` seconds: how long the rank was at work, how long not, and the latter as a share."""
    idle_s = max(0.0, run_s - busy_s)
    return {
        f"rank{rank}_busy_s": busy_s,
        f"rank{rank}_idle_s": idle_s,
        f"rank{rank}_idle_share": idle_s / run_s if run_s else 0.0,
    }
