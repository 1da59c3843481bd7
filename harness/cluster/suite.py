"""`harness run --ray`: a suite's cells measured on the nodes of a cluster, their records in one folder."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.api import HarnessError, RunSpec, first_line, parse_record, to_json
from harness.cluster.connection import Cluster
from harness.cluster.groups import Group, choose, fits, group, in_words, label
from harness.cluster.node_run import NodeRun, Told, run_cells
from harness.cluster.placement import Node
from harness.cluster.versions import versions_for
from harness.common.files import inside, os_errors, replace_with
from harness.run.measure import Measured, UnmetRequirements, run_folder
from harness.run.options import RunOptions, Selection
from harness.run.progress import Progress
from harness.run.steps import REFUSALS, Step
from harness.run.store import Store, write_suite_copy

#: How often a silent cluster is looked at, and how long there may be no node that fits, in seconds.
_LOOK_S, _PATIENCE_S = 1.0, 300.0
#: A group of cells whose task is lost so often ends the run.
_MAX_LOSSES = 3


@dataclass
class _Task:
    """A group at work on a node; `tells` is the generator of its records."""

    group: Group
    node: Node
    tells: Any


def measure_on(cluster: Cluster, options: RunOptions, selection: Selection, progress: Progress) -> Measured:
    """Runs the selected cells on the nodes that meet the suite's requirements, a group of cells at a time on each.

    Raises UnmetRequirements where no node does, HarnessError for what stops the whole run.
    """
    suite, out, cells = selection.suite, run_folder(options, selection), selection.cells
    if not any(fits(suite.requires, node) for node in cluster.nodes()):
        raise UnmetRequirements(f"no node of the cluster meets {suite.name}, which needs {in_words(suite.requires)}")
    store = Store(out)
    whole = len(cells) == len(suite.cells)
    with progress, closing(store):
        store.open(options.fresh and whole)
        if options.fresh and not whole:
            store.set_aside(cells)
        write_suite_copy(selection.path, out)
        _Run(cluster, options, selection, store, progress).run()
        fingerprints = {cell.fingerprint() for cell in cells}
        return Measured([r for r in store.latest().values() if r.fingerprint in fingerprints], out)


class _Run:
    """The tasks of one run."""

    def __init__(
        self, cluster: Cluster, options: RunOptions, selection: Selection, store: Store, progress: Progress
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._selection = selection
        self._store = store
        self._progress = progress
        self._groups = group(selection.cells, store.latest())
        self._tasks: list[_Task] = []
        with os_errors(f"cannot read {selection.path}"):
            self._text = selection.path.read_text()
        self._engines = tuple(sorted({cell.engine for cell in selection.cells if cell.launcher == "process"}))
        self._versions: Mapping[str, str] = versions_for(*self._engines)
        self._fitted = time.monotonic()

    def run(self) -> None:
        """Until nothing is left to do. Groups that have ended are not begun again."""
        waiting = [group for group in self._groups if group.todo]
        self._progress.planned([s for g in waiting for s in g.todo], sum(len(g.done) for g in self._groups))
        while waiting or self._tasks:
            self._hand_out(waiting)
            for task in self._telling():
                self._hear(task, waiting)

    def _hand_out(self, waiting: list[Group]) -> None:
        """Gives each idle node that fits a group."""
        nodes = {label(node): node for node in self._cluster.nodes() if fits(self._selection.suite.requires, node)}
        busy = {task.node.id for task in self._tasks}
        for name, node in nodes.items():
            if node.id in busy or (chosen := choose(waiting, name, nodes)) is None:
                continue
            waiting.remove(chosen)
            if chosen.mixed or chosen.node not in ("", name):
                self._begin_anew(chosen)
            chosen.node = name
            self._tasks.append(_Task(chosen, node, self._start(chosen, node)))
            job = chosen.cells[0]
            self._progress.note(
                f"node {node.name} ({name}) measures {job.model.id}, {job.workload.label}: {len(chosen.todo)} launches"
            )
        if self._tasks:
            self._fitted = time.monotonic()
        elif time.monotonic() - self._fitted > _PATIENCE_S:
            raise HarnessError(
                f"no node of the cluster that meets the suite was there for {_PATIENCE_S:.0f} s; run the same command "
                "again when there is one"
            )

    def _begin_anew(self, chosen: Group) -> None:
        """Sets aside what another machine measured: it must not be compared with what this one will."""
        self._store.set_aside(chosen.cells)
        if chosen.done:
            self._progress.note(f"node {chosen.node} is gone: what it measured is set aside, and measured again")
        left = chosen.todo
        chosen.done, chosen.mixed = [], False
        self._progress.added([step for step in chosen.todo if step not in left])

    def _start(self, chosen: Group, node: Node) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        requires = self._selection.suite.requires
        task = ray.remote(run_cells).options(
            num_cpus=node.resources["CPU"],  # nothing else of Ray's runs beside a measurement
            num_gpus=1 if requires.device_memory else 0,
            memory=requires.host_memory or None,
            resources={requires.machine: 0.001} if requires.machine else None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            num_returns="streaming",
            max_retries=0,
        )
        return task.remote(self._node_run(chosen))

    def _node_run(self, chosen: Group) -> NodeRun:
        given, path = self._options, self._selection.path
        options = ["--extra-tries", str(given.extra_tries)]
        for override in given.overrides:
            options += ["--set", override]
        for cell in chosen.cells:
            options += ["--cell", cell.name]
        options += ["--launcher", given.launcher] if given.launcher else []
        options += ["--data-dir", str(given.data_dir.absolute())] if given.data_dir else []
        records = tuple(json.dumps(to_json(record), allow_nan=False) for record in chosen.done)
        omp = os.environ.get("OMP_NUM_THREADS")
        cache, folder = given.cache.absolute(), Path.cwd()
        return NodeRun(
            path.name, self._text, tuple(options), records, cache, folder, omp, self._engines, self._versions
        )

    def _telling(self) -> list[_Task]:
        """The tasks that have something to tell; after a while without, none."""
        import ray

        waiting = [task.tells for task in self._tasks]
        ready, _ = ray.wait(waiting, timeout=_LOOK_S) if waiting else ([], [])
        if not ready:
            self._cluster.require_alive()
            time.sleep(0 if waiting else _LOOK_S)
        return [task for task in self._tasks if any(task.tells == one for one in ready)]

    def _hear(self, task: _Task, waiting: list[Group]) -> None:
        """Keeps a record; a task that was lost is done again."""
        import ray

        try:
            told = ray.get(next(task.tells))
        except StopIteration:
            self._tasks.remove(task)
        except ray.exceptions.RayTaskError as exc:
            cause = exc.cause
            kind = UnmetRequirements if isinstance(cause, UnmetRequirements) else HarnessError
            text = str(cause) if isinstance(cause, HarnessError) else f"{type(cause).__name__}: {first_line(cause)}"
            raise kind(f"node {task.node.name}: {text}") from exc
        except ray.exceptions.RayError as exc:
            self._cluster.require_alive()
            self._tasks.remove(task)
            task.group.losses += 1
            if task.group.losses == _MAX_LOSSES:
                raise HarnessError(
                    f"the same cells were lost {_MAX_LOSSES} times, last on node {task.node.name}: {first_line(exc)}; "
                    "run the same command again to go on"
                ) from exc
            self._progress.note(f"node {task.node.name} lost its cells; they go on there or elsewhere")
            waiting.append(task.group)
        else:
            assert isinstance(told, Told)
            self._keep(task, told)

    def _keep(self, task: _Task, told: Told) -> None:
        record = parse_record(told.record.encode(), f"node {task.node.name}")
        record = replace(record, provenance={**record.provenance, "node": task.group.node})
        cell = next((c for c in task.group.cells if c.fingerprint() == record.fingerprint), None)
        if cell is None:
            raise HarnessError(f"node {task.node.name} measured another cell than it was told: {record.spec.name}")
        with suppress(OSError):  # a log is no record
            replace_with(inside(self._store.out.resolve(), f"logs/{cell.name}.log"), told.log)
        self._store.append(record)
        task.group.done.append(record)
        self._progress.finished(Step(cell, record.repeat), record)
        self._drop_repeats(task.group, cell, record.status)

    def _drop_repeats(self, chosen: Group, cell: RunSpec, status: str) -> None:
        """Tells how much shorter the run became, if a cell will not be repeated."""
        if status not in REFUSALS:
            return
        measured = {record.repeat for record in chosen.done if record.fingerprint == cell.fingerprint()}
        for repeat in set(range(cell.repeats)) - measured:
            self._progress.dropped(Step(cell, repeat))
