"""Cuts layers into nano-batches and runs them in virtual time, each operation once its rows and its units are free.

Operations of one kind never run beside each other: they would share the resource that bounds both. Source: NanoFlow
(Zhu et al. 2025), section 4.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engines.planning.nano_layer import LayerOperation

#: Shares of units that differ by less are equal.
_EPSILON = 1e-9


@dataclass(frozen=True)
class Cuts:
    """Into how many parts operations are cut, those that allow four (KQV and attention) and the others; and the
    fraction of the batch where it is cut in two. Of four parts each half has two."""

    attention: int
    dense: int
    at: float = 0.5

    def rows(self, operation: LayerOperation) -> list[tuple[float, float]]:
        """Where each part of an operation begins and ends, as fractions of the batch."""
        parts = min(operation.most_parts, self.attention if operation.most_parts == 4 else self.dense)
        halves = {1: [0.0, 1.0], 2: [0.0, self.at, 1.0], 4: [0.0, self.at / 2, self.at, (1 + self.at) / 2, 1.0]}
        edges = halves[parts]
        return list(pairwise(edges))


@dataclass(frozen=True)
class Task:
    """One part of an operation in one layer. `seconds`: with all units; `after`: indices of tasks before this one."""

    name: str
    kind: str
    layer: int
    part: int
    rows: tuple[float, float]
    seconds: float
    after: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What it has in common with the same part in other layers, which gets as many units."""
        return self.name, self.part


@dataclass(frozen=True)
class Timed:
    """When each task starts and ends, and the task whose end it had waited for; None at the beginning."""

    starts: Sequence[float]
    ends: Sequence[float]
    causes: Sequence[int | None]

    @property
    def length(self) -> float:
        """Seconds until the last task ends."""
        return max(self.ends)

    def critical_path(self) -> list[int]:
        """The tasks that made the last one end when it does, from the last to the first."""
        path: list[int] = []
        task: int | None = max(range(len(self.ends)), key=self.ends.__getitem__)
        while task is not None:
            path.append(task)
            task = self.causes[task]
        return path


def tasks_of(operations: Sequence[LayerOperation], cuts: Cuts, layers: int) -> list[Task]:
    """The tasks of some layers; what a task waits for stands before it."""
    tasks: list[Task] = []
    numbers: dict[tuple[str, int], list[int]] = {}  # by operation and layer
    for layer in range(layers):
        for operation in operations:
            before = [(name, layer) for name in operation.after] + [(name, layer - 1) for name in operation.after_layer]
            parts = cuts.rows(operation)
            factor = operation.cut.get(len(parts), 1.0)
            first = len(tasks)
            for part, (begin, end) in enumerate(parts):
                after = tuple(
                    i
                    for place in before
                    for i in numbers.get(place, ())
                    if tasks[i].rows[0] < end and begin < tasks[i].rows[1]
                )
                seconds = operation.seconds * (end - begin) * factor
                tasks.append(Task(operation.name, operation.kind, layer, part, (begin, end), seconds, after))
            numbers[operation.name, layer] = list(range(first, len(tasks)))
    return tasks


def followers_of(tasks: Sequence[Task]) -> list[list[int]]:
    """By task, those that wait for it."""
    followers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(i)
    return followers


def schedule(
    tasks: Sequence[Task], followers: Sequence[Sequence[int]], seconds: Sequence[float], units: Sequence[float]
) -> Timed:
    """Runs tasks that take `seconds` on `units` of the machine's: of those that are ready, the one first that has the
    longest path of tasks behind it. `followers`: of these tasks."""
    count = len(tasks)
    behind = [0.0] * count
    for i in range(count - 1, -1, -1):
        longest = 0.0
        for j in followers[i]:
            longest = max(longest, behind[j])
        behind[i] = seconds[i] + longest
    waits = [len(task.after) for task in tasks]
    ready = sorted((-behind[i], i) for i in range(count) if not waits[i])
    starts, ends = [0.0] * count, [0.0] * count
    causes: list[int | None] = [None] * count
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    free, now = 1.0, 0.0
    ended: list[int] = []
    while ready or running:
        for place in list(ready):
            i = place[1]
            if units[i] <= free + _EPSILON and tasks[i].kind not in busy:
                busy.add(tasks[i].kind)
                free -= units[i]
                starts[i], ends[i] = now, now + seconds[i]
                causes[i] = next((j for j in ended if j in tasks[i].after), ended[0] if ended else None)
                heapq.heappush(running, (ends[i], i))
                ready.remove(place)
        now, ended = running[0][0], []
        while running and running[0][0] <= now:
            _, i = heapq.heappop(running)
            busy.discard(tasks[i].kind)
            free += units[i]
            ended.append(i)
            for j in followers[i]:
                waits[j] -= 1
                if not waits[j]:
                    insort(ready, (-behind[j], j))
    return Timed(starts, ends, causes)
