"""What ran when in a pass, by lane, and the pass that is kept to be looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Something that ran: `lane` is compute, attention, load, cast or wait; times by `time.perf_counter`."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Spans of the pass in hand, sums by lane over all passes, and the spans of the busiest pass.

    `add` may be called from any thread: appending to a list is atomic.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._most_rows = -1
        self.kept: tuple[Span, ...] = ()
        self.passes = 0
        self.wait_s = 0.0
        self.load_s = 0.0

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Notes one span."""
        self._spans.append(Span(lane, name, start_s, end_s))

    def end_pass(self, rows: int) -> None:
        """Closes a pass of `rows` tokens; the one with the most rows, a later one among equals, is kept."""
        spans, self._spans = self._spans, []
        self.passes += 1
        self.wait_s += sum(s.end_s - s.start_s for s in spans if s.lane == "wait")
        self.load_s += union_s([s for s in spans if s.lane == "load"])
        if rows >= self._most_rows:
            self._most_rows = rows
            self.kept = tuple(spans)


def union_s(spans: list[Span]) -> float:
    """Seconds during which at least one of the spans ran."""
    length, reach = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start_s):
        length += max(0.0, span.end_s - max(span.start_s, reach))
        reach = max(reach, span.end_s)
    return length
