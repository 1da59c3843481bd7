"""The workers of a batch job as its command sees them: started, handed shards, and replaced where they die."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness import registry
from harness.api import (
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    InfeasibleError,
    LocalModel,
    RefusedEvent,
    RunSpec,
    first_line,
)
from harness.batch.job import Lengths
from harness.cluster.connection import Cluster
from harness.cluster.ledger import Ledger, Shard, shard_size
from harness.cluster.placement import worker_needs
from harness.cluster.versions import versions_for
from harness.cluster.worker import Order, Worker
from harness.common.files import is_there

#: How often a silent cluster is looked at, how long all workers may wait for a place, and how long an idle one may take
#: to close, in seconds.
_LOOK_S, _PATIENCE_S, _CLOSE_S = 1.0, 300.0, 10.0
#: So many workers in a row that die before they have loaded end the job.
_MAX_STILLBORN = 3


@dataclass
class _Member:
    """A worker: its actor, what it does, and what it will tell: a reference, or a generator of them."""

    actor: Any
    tells: Any
    stage: Literal["placing", "loading", "idle", "working"] = "placing"
    node: str = "?"
    shard: Shard | None = None


class Workers:
    """As many workers as asked for, each with an engine of its own, that answer requests together."""

    def __init__(
        self, cluster: Cluster, count: int, order: Order, needs: Mapping[str, float], note: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._count = count
        self._order = order
        self._needs = needs
        self._note = note
        self._versions = versions_for(order.cell.engine)
        self._members: list[_Member] = []
        self._stillborn = 0
        self._said: set[str] = set()
        self._placed = time.monotonic()

    def gather(self, on_progress: Callable[[int, int], None]) -> None:
        """Starts all workers and waits for the first that has loaded; the others join as they have.

        Raises InfeasibleError where the limits are too small, HarnessError where no worker can be started.
        """
        for _ in range(self._count):
            self._start()
        while not (loaded := sum(member.stage == "idle" for member in self._members)):
            on_progress(0, self._count)
            for member in self._telling():
                self._hear(member)
        on_progress(loaded, self._count)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult | RefusedEvent]:
        """One result for each request as it comes, or the reason why workers die over it.

        Raises HarnessError for what an engine raises, and where the cluster goes away.
        """
        ledger = Ledger(requests, shard_size(len(requests), self._count, self._order.cell.policy.block_size))
        while not ledger.done or any(member.shard for member in self._members):
            for member in self._members:
                if member.stage == "idle" and (shard := ledger.take()):
                    member.stage, member.shard = "working", shard
                    call = member.actor.generate.options(num_returns="streaming")
                    member.tells = call.remote([*shard.requests.values()])
            for member in self._telling():
                told = self._hear(member)
                if isinstance(told, GenerationResult) and ledger.settle(told.id):
                    yield told
                elif isinstance(told, str) and member.shard is not None:
                    left, member.shard = member.shard, None
                    yield from ledger.give_back(left, told)

    def trace(self) -> EngineTrace:
        """Nothing: engines keep traces of a shard, not of the job."""
        return EngineTrace()

    def close(self) -> None:
        """Ends all workers; the idle ones remove what they have on disk first. What is left of the others is removed by
        the next that use the same cache."""
        import ray

        if self._cluster.gone:  # Ray would wait for it
            return
        idle = [member for member in self._members if member.stage == "idle"]
        with suppress(ray.exceptions.RayError):
            closing = [member.actor.close.remote() for member in idle]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S) if closing else None
        for member in self._members:
            with suppress(ray.exceptions.RayError):
                ray.kill(member.actor)
        self._members = []

    def _start(self) -> None:
        import ray

        needs = self._needs
        actor = ray.remote(Worker).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], memory=int(needs["memory"]), scheduling_strategy="SPREAD"
        )
        started = actor.remote()
        self._members.append(_Member(started, started.greet.remote(self._order.cell.engine, self._versions)))

    def _telling(self) -> list[_Member]:
        """The members that have something to tell; after a while without, none. Raises HarnessError where the cluster
        is gone, or has no place for a worker."""
        import ray

        busy = [member for member in self._members if member.stage != "idle"]
        waiting = [member.tells for member in busy]
        ready, _ = ray.wait(waiting, timeout=_LOOK_S)
        if not ready:
            self._cluster.require_alive()
            self._require_place()
            return []
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return [member for member in busy if any(member.tells == one for one in ready)]

    def _require_place(self) -> None:
        if any(member.stage != "placing" for member in self._members):
            self._placed = time.monotonic()
        elif time.monotonic() - self._placed > _PATIENCE_S:
            raise HarnessError(
                f"no node of the cluster had room for a worker for {_PATIENCE_S:.0f} s; run the same command again "
                "when one has"
            )

    def _hear(self, member: _Member) -> GenerationResult | str | None:
        """What a member tells: a result, or why its shard is given back. A member that died is replaced."""
        import ray

        try:
            told = ray.get(next(member.tells) if member.stage == "working" else member.tells)
        except StopIteration:
            member.stage = "idle"
            return "the engine ended without an answer"
        except ray.exceptions.RayTaskError as exc:
            raise self._raised(member, exc.cause) from exc
        except ray.exceptions.RayError as exc:
            return self._died(member, exc)
        if member.stage == "placing":
            member.stage, member.node = "loading", self._cluster.name_of(told)
            member.tells = member.actor.load.remote(self._order)
        elif member.stage == "loading":
            member.stage, self._stillborn = "idle", 0
            self._note(f"a worker has loaded on node {member.node}")
            for text in told:
                if text not in self._said:
                    self._said.add(text)
                    self._note(text)
        else:
            assert isinstance(told, GenerationResult)
            return told
        return None

    def _raised(self, member: _Member, cause: BaseException | None) -> HarnessError:
        """What ends the job where a worker's engine raises, as it does without Ray."""
        if isinstance(cause, InfeasibleError):
            return cause
        text = first_line(cause or Exception())
        text = text if isinstance(cause, HarnessError) else f"{type(cause).__name__}: {text}"
        where = "a node" if member.node == "?" else f"node {member.node}"
        return HarnessError(f"a worker on {where} failed: {text}")

    def _died(self, member: _Member, exc: Exception) -> str:
        """Replaces a member; returns why it died. Raises HarnessError where workers do nothing but die."""
        self._cluster.require_alive()
        why = _why(exc)
        self._members.remove(member)
        if member.shard is None:
            self._stillborn += 1
            if self._stillborn == _MAX_STILLBORN:
                raise HarnessError(f"{_MAX_STILLBORN} workers in a row died before they had loaded: {why}")
        self._note(f"a worker on node {member.node} died ({why}); another takes its place")
        self._start()
        return why


@contextmanager
def loaded_workers(
    cluster: Cluster, count: int, cell: RunSpec, model: LocalModel, cache: Path, lengths: Lengths,
    note: Callable[[str], None], on_progress: Callable[[int, int], None],
) -> Iterator[Workers]:  # fmt: skip
    """As `harness.batch.job.loaded_engine`, on `count` workers of a cluster; they are ended in the end."""
    digest = registry.identity(cell.engine, model, cache, lambda done, total: None)
    spec = cell.model
    if is_there(spec.id):  # workers have other working folders
        cell = replace(cell, model=replace(spec, id=str(Path(spec.id).absolute())))
    order = Order(cell, cache.absolute(), lengths, digest)
    workers = Workers(cluster, count, order, worker_needs(cell, cluster.nodes(), count), note)
    try:
        workers.gather(on_progress)
        yield workers
    finally:
        workers.close()


def _why(exc: Exception) -> str:
    """Why a worker died, in a line, of the page that Ray has to say."""
    text = str(exc)
    for pattern in (r"exit detail: (.*?)(?:\. |\n|$)", r"(The node .*?)(?:\. |\n|$)", r"(running low on memory)"):
        if found := re.search(pattern, text):
            return found[1][:200]
    return first_line(exc)[:200]
