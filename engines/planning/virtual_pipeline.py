"""A pipeline in virtual time: stages and the links between them, each of which serves one pass at a time, and groups of
sequences that travel through them.

The order is the engine's (session_groups.py and pipeline/ in engines.offload): the rank of the last stage begins a pass
of each group that has none under way, the others run passes in the order in which they began, and the oldest one ends
before the next are begun.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)


class Stage(Protocol[W_contra]):
    """What runs passes, one at a time."""

    def run_pass(self, work: W_contra, ready: float) -> tuple[float, float]:
        """When a pass whose input is there at time `ready` begins, and when it ends."""


class Group(Protocol[W]):
    """Sequences that share passes, one of which is under way at a time."""

    @property
    def next_arrival_s(self) -> float | None:
        """When there is work next; None if all is done."""

    def begin(self, now: float) -> W | None:
        """The work of the next pass; None where there is none yet, or no more."""

    def end(self, work: W, now: float) -> None:
        """A pass has left the last stage."""


class VirtualLink:
    """Carries `rate` bytes/s (None: any number in no time), which arrive `delay_s` seconds later."""

    def __init__(self, rate: float | None = None, delay_s: float = 0.0) -> None:
        self._rate, self.delay_s = rate, delay_s
        self._free = self.busy_s = 0.0

    def carry(self, nbytes: float, ready: float) -> float:
        """When bytes arrive that may be sent from time `ready` on, after all that were sent before."""
        seconds = nbytes / self._rate if self._rate else 0.0
        self._free = max(self._free, ready) + seconds
        self.busy_s += seconds
        return self._free + self.delay_s


@dataclass(frozen=True)
class Visit:
    """A pass of a group in a stage: when its input was sent and arrived, and when the stage began and ended it."""

    group: int
    stage: int
    sent_s: float
    arrived_s: float
    start_s: float
    end_s: float


def run_pipeline(
    stages: Sequence[Stage[W]], links: Sequence[VirtualLink], groups: Sequence[Group[W]], nbytes: Callable[[W], float]
) -> list[Visit]:
    """Runs all groups to their end.

    `links[k]` leads from stage k to the next one, the last link back to the first stage: it carries token ids, which
    count as no bytes. `nbytes`: of what a pass sends from stage to stage.
    """
    visits: list[Visit] = []
    under_way: deque[tuple[int, W, float, float]] = deque()
    now, last = 0.0, len(stages) - 1
    while True:
        flying = {i for i, *_ in under_way}
        for i, group in enumerate(groups):
            if i in flying or (work := group.begin(now)) is None:
                continue
            sent, arrived = now, links[last].carry(0.0, now)
            for k in range(last):
                start, end = stages[k].run_pass(work, arrived)
                visits.append(Visit(i, k, sent, arrived, start, end))
                sent, arrived = end, links[k].carry(nbytes(work), end)
            under_way.append((i, work, sent, arrived))
        if under_way:
            i, work, sent, arrived = under_way.popleft()
            start, now = stages[last].run_pass(work, max(arrived, now))
            visits.append(Visit(i, last, sent, arrived, start, now))
            groups[i].end(work, now)
            continue
        arrivals = [arrival for group in groups if (arrival := group.next_arrival_s) is not None]
        if not arrivals:
            return visits
        now = max(now, min(arrivals))


@dataclass(frozen=True)
class StageUse:
    """What a stage did in a job, in seconds. All but the last add up to the job's.

    busy_s: it ran passes, waits for its own disk included. fill_s: until its first one began. drain_s: after its last
    one. link_s: without work while the input of its next pass was on the link. stage_s: without work, and no pass had
    left the stage before. used: of its resources, which work side by side.
    """

    busy_s: float
    fill_s: float
    drain_s: float
    link_s: float
    stage_s: float
    used: dict[str, float]

    @property
    def total_s(self) -> float:
        return self.busy_s + self.fill_s + self.drain_s + self.link_s + self.stage_s

    @property
    def idle_share(self) -> float:
        """Part of the job's time that it had no pass to run."""
        return 1 - self.busy_s / self.total_s if self.total_s else 0.0

    @property
    def limited_by(self) -> str:
        """The resource that it needs for longest."""
        return max(self.used, key=lambda name: self.used[name])


def stage_use(visits: Sequence[Visit], stage: int, end_s: float, used: dict[str, float]) -> StageUse:
    """That of one stage in a job that ends at `end_s`."""
    mine = [visit for visit in visits if visit.stage == stage]
    gaps = [
        (after.start_s - before.end_s, max(0.0, after.arrived_s - max(before.end_s, after.sent_s)))
        for before, after in pairwise(mine)
    ]
    link_s = sum(min(gap, travels) for gap, travels in gaps)
    return StageUse(
        busy_s=sum(visit.end_s - visit.start_s for visit in mine),
        fill_s=mine[0].start_s,
        drain_s=end_s - mine[-1].end_s,
        link_s=link_s,
        stage_s=sum(gap for gap, _ in gaps) - link_s,
        used=used,
    )


@dataclass(frozen=True)
class PipelineUse:
    """What the stages of a pipeline did, in their order, with so many `groups` of sequences under way.

    layers: of each stage. longest_link_s: for how long the busiest link carried something.
    """

    groups: int
    layers: Sequence[int]
    stages: Sequence[StageUse]
    longest_link_s: float

    @property
    def bottleneck(self) -> tuple[int, str]:
        """The stage that is at work for longest, and what limits it: a resource of its own, or the `network` where a
        link is busy for longer than any stage."""
        stage = max(range(len(self.stages)), key=lambda k: self.stages[k].busy_s)
        network = self.longest_link_s > self.stages[stage].busy_s
        return stage, "network" if network else self.stages[stage].limited_by
