"""A worker of a batch job, an actor of Ray: one engine on a node, which answers the shards that it is handed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness import registry
from harness.api import Engine, GenerationRequest, GenerationResult, HarnessError, RunSpec
from harness.batch.job import Lengths, engine_errors, loaded_engine
from harness.cluster.versions import require_same
from harness.common.locks import in_use
from harness.common.scratch import remove_abandoned


@dataclass(frozen=True)
class Order:
    """What a worker loads: a cell, for sequences of these lengths; `identity` is a digest of the model's weights, which
    must be the same on every node."""

    cell: RunSpec
    cache: Path
    lengths: Lengths
    identity: str


class Worker:
    """An engine in a process of a node. Whatever an engine raises is a HarnessError here."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._engine: Engine | None = None
        self._name = ""

    def greet(self, engine: str, versions: Mapping[str, str]) -> str:
        """Ray's id of the node. Raises HarnessError where this node has other versions than the command's."""
        import ray

        require_same(versions, engine)
        self._name = engine
        return str(ray.get_runtime_context().get_node_id())

    def load(self, order: Order) -> list[str]:
        """Loads the engine; returns what it says of that. Raises InfeasibleError where the limits are too small, and
        HarnessError for a model of other weights."""
        notes: list[str] = []
        cell, cache = order.cell, order.cache
        with engine_errors(cell.engine):
            self._opened.enter_context(in_use(cache))
            remove_abandoned(cache)
            model = registry.prepare_model(cell.engine, cell.model, cache)
            if registry.identity(cell.engine, model, cache, _quiet) != order.identity:
                raise HarnessError(f"it has other weights of {cell.model.id}: put the same files on every node")
            self._engine = self._opened.enter_context(loaded_engine(cell, model, cache, order.lengths, notes.append))
        return notes

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Each result as it finishes."""
        assert self._engine is not None, "loaded first"
        with engine_errors(self._name):
            yield from self._engine.generate(requests)

    def close(self) -> None:
        """Frees the engine and what it has on disk."""
        self._opened.close()


def _quiet(done: int, total: int) -> None: ...
