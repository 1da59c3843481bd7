"""The search for a pipeline of nano-batches: how often operations are cut, where, and how many units each part gets.

Two stages, as NanoFlow's auto-search has them (Zhu et al. 2025, section 5.5). The first takes operations of different
kinds to run beside each other at full speed, and keeps the cuts whose pipelines are shortest. The second knows their
interference: from several divisions of the units it walks the critical path and shifts units to or from an operation
there as long as the pipeline becomes shorter.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import median

from engines.planning.interference import LEAST_UNITS, Interference
from engines.planning.nano_layer import LayerOperation, measured_layer
from engines.planning.nano_schedule import Cuts, Timed, followers_of, schedule, tasks_of
from harness.api import HarnessError, LayerTimes, ModelShape, NanoOperation, NanoOrder, NanoPipeline
from harness.api.nano import PRODUCTS

Key = tuple[str, int]
Units = Mapping[Key, float]
#: Parts of KQV and attention, and of the other operations; and where a batch is cut in two.
_PARTS, _CUTS_AT = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)), (0.5, 0.4, 0.6)
#: Layers of a trial: the first one fills the pipeline, and the last one drains it.
_LAYERS = 3
#: Cuts and divisions of units that the second stage walks on from, by their length so far.
_BEST_CUTS, _BEST_STARTS = 2, 4
#: Units of kinds other than products where the walk starts, and what it shifts.
_LEVELS, _STEPS = (0.1, 0.3, 1.0), (0.2, 0.05, 0.01)
#: Shares of the units for the second of two operations that shall run beside each other.
_SHARES = (0.1, 0.2, 0.3)
#: A pipeline that is shorter by less than this part is no shorter.
_SHORTER = 1e-6
#: Layers of the pipeline for a measured model: enough for a steady state.
_SHOWN = 4
#: Products by the operation that they are.
_PRODUCT = "GEMM-"


def search_measured(shape: ModelShape, times: LayerTimes) -> NanoPipeline:
    """The pipeline for a model whose layer was measured; some of its layers."""
    return search(measured_layer(shape, times), Interference(times.beside), min(_SHOWN, shape.num_layers))


def order_of(pipeline: NanoPipeline, times: LayerTimes | None = None) -> NanoOrder | None:
    """The order of products by which an engine runs a pipeline; None for one that cuts no product.

    It is that of the products between the starts of two layers in the middle, where these are all of a layer's; else
    that of one layer's; else, where that starts with its second part, one product after the other. `times`: those the
    pipeline was searched with, which tell on how many threads attention ran.
    """
    products = [one for one in pipeline.operations if one.name.startswith(_PRODUCT)]
    first = [one for one in products if one.name == "GEMM-KQV" and one.part == 0]
    if pipeline.parts["GEMM-KQV"] == 1:
        return None
    middle = first[len(first) // 2]
    following = [one for one in first if one.layer == middle.layer + 1]
    window = [one for one in products if following and middle.start_s <= one.start_s < following[0].start_s]
    layer = [one for one in products if one.layer == middle.layer]
    beside = [one.units for one in pipeline.operations if one.name == "DecodeAttention" and one.units < 1]
    rows = {one.part: one.rows for one in layer if one.name == "GEMM-KQV"}
    shares = {
        "cut": rows[len(rows) // 2][0],
        "attention": _threads_of(median(beside or [1.0]), times.attention if times else ()),
    }
    for found in (window, layer):
        if len(found) == len(layer):
            with suppress(HarnessError):
                return NanoOrder(tuple((one.name.removeprefix(_PRODUCT), one.part) for one in found), **shares)
    parts = {name: range(pipeline.parts[_PRODUCT + name]) for name in PRODUCTS}
    return NanoOrder(tuple((name, part) for name in PRODUCTS for part in parts[name]), **shares)


def _threads_of(units: float, points: Sequence[tuple[float, float]]) -> float:
    """The share of the threads that came nearest to so many `units`; all where attention has all units."""
    if units == 1 or not points:
        return 1.0
    return min(points, key=lambda point: abs(point[0] - units))[1]


def search(operations: Sequence[LayerOperation], interference: Interference, layers: int) -> NanoPipeline:
    """The shortest pipeline found for some layers, never longer than the operations one after the other."""
    sequential = sum(operation.seconds for operation in operations) * layers
    best = _Layers(operations, Cuts(1, 1), layers, interference).pipeline({}, sequential)
    if len({operation.kind for operation in operations}) == 1:
        return best
    uncut, *cut = (_Layers(operations, Cuts(*parts), min(layers, _LAYERS), interference) for parts in _PARTS)
    for found in (uncut, *sorted(cut, key=_Layers.without_interference)[:_BEST_CUTS]):
        units = found.best_units()
        for at in _CUTS_AT if found is not uncut else (0.5,):
            trial = _Layers(operations, replace(found.cuts, at=at), min(layers, _LAYERS), interference)
            shifted = units if at == 0.5 else trial.walk(units)
            whole = _Layers(operations, trial.cuts, layers, interference)
            pipeline = whole.pipeline(shifted, sequential)
            if pipeline.length_s < best.length_s * (1 - _SHORTER):
                best = pipeline
    return best


class _Layers:
    """Some layers that are cut in one way."""

    def __init__(
        self, operations: Sequence[LayerOperation], cuts: Cuts, layers: int, interference: Interference
    ) -> None:
        self.cuts = cuts
        self._tasks = tasks_of(operations, cuts, layers)
        self._followers = followers_of(self._tasks)
        self._interference = interference
        self._kinds = {task.key: task.kind for task in self._tasks}

    def without_interference(self) -> float:
        """Seconds if operations of different kinds did not slow each other: the first stage."""
        seconds = [task.seconds for task in self._tasks]
        return schedule(self._tasks, self._followers, seconds, [0.0] * len(seconds)).length

    def best_units(self) -> Units:
        """The units of each part for the shortest pipeline found: the second stage."""
        starts = [(self._run(units).length, i, units) for i, units in enumerate(self._starts())]
        walked = [self.walk(units) for _, _, units in sorted(starts)[:_BEST_STARTS]]
        return min(walked, key=lambda units: self._run(units).length)

    def pipeline(self, units: Units, sequential_s: float) -> NanoPipeline:
        """The pipeline with so many units by part; all of them where none are named."""
        timed = self._run(units)
        operations = [
            NanoOperation(task.name, task.kind, task.layer, task.part, task.rows, start, end, units.get(task.key, 1.0))
            for task, start, end in zip(self._tasks, timed.starts, timed.ends, strict=True)
        ]
        return NanoPipeline(tuple(sorted(operations, key=lambda o: (o.start_s, o.end_s))), sequential_s)

    def _run(self, units: Units) -> Timed:
        shares = {key: units.get(key, 1.0) for key in self._kinds}
        speeds = {key: self._interference.performance(kind, shares[key]) for key, kind in self._kinds.items()}
        seconds = [task.seconds / speeds[task.key] for task in self._tasks]
        return schedule(self._tasks, self._followers, seconds, [shares[task.key] for task in self._tasks])

    def _starts(self) -> Iterator[Units]:
        """Divisions of the units: some for each kind beside products, which leave those of one or of all free."""
        others = sorted({kind for kind in self._kinds.values() if kind != "compute"})
        levels = [sorted({*_LEVELS, *self._interference.levels(kind)}) for kind in others]
        for shares in itertools.product(*levels):
            by_kind = dict(zip(others, shares, strict=True))
            beside = [share for share in shares if share < 1]  # with all units a kind runs alone
            for left in dict.fromkeys((1 - max(beside, default=0.0), max(LEAST_UNITS, 1 - sum(beside)))):
                yield {key: by_kind.get(kind, left) for key, kind in self._kinds.items()}

    def walk(self, units: Units) -> Units:
        """Shifts units to or from the operations of the critical path until none of that shortens the pipeline."""
        timed, shifted = self._run(units), True
        while shifted:
            shifted = False
            for moved in self._shifts(units, timed):
                found = self._run(moved)
                if found.length < timed.length * (1 - _SHORTER):
                    units, timed, shifted = moved, found, True
                    break
        return units

    def _shifts(self, units: Units, timed: Timed) -> Iterator[Units]:
        """Other divisions of the units, for each part on the critical path."""
        path = timed.critical_path()
        for later, earlier in pairwise(path):  # one that waits for units, not for rows, may run beside what holds them
            if self._tasks[later].kind != self._tasks[earlier].kind and earlier not in self._tasks[later].after:
                for share in (*_SHARES, *(1 - share for share in _SHARES)):
                    yield {**units, self._tasks[later].key: share, self._tasks[earlier].key: 1 - share}
        critical = dict.fromkeys(self._tasks[i].key for i in path)
        beside = self._beside(timed)
        for key in critical:
            others = beside.get(key, set())
            room = 1 - max((units[other] for other in others), default=0.0)
            if room > units[key]:
                yield {**units, key: room}
            for step in _STEPS:
                more, less = min(1.0, units[key] + step), units[key] - step
                if more > units[key]:
                    given = {other: max(LEAST_UNITS, min(units[other], 1 - more)) for other in others}
                    yield {**units, **given, key: more}
                    yield {**units, key: more}
                if less >= LEAST_UNITS:
                    yield {**units, key: less}

    def _beside(self, timed: Timed) -> Mapping[Key, set[Key]]:
        """By part, those that run beside it in some layer."""
        found: dict[Key, set[Key]] = {}
        order = sorted(range(len(self._tasks)), key=timed.starts.__getitem__)
        for place, i in enumerate(order):
            for j in order[place + 1 :]:
                if timed.starts[j] >= timed.ends[i]:
                    break
                found.setdefault(self._tasks[i].key, set()).add(self._tasks[j].key)
                found.setdefault(self._tasks[j].key, set()).add(self._tasks[i].key)
        return found
