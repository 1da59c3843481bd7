"""Nano-batches: what a layer's operations take on a machine, and the pipeline that a search makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTimes:
    """A layer in one pass of a sweep's batch, as measured on a machine. Seconds are of the whole batch on all threads.

    `weight_s`: of the products, for each weight of the layer; `attention_s`: of decode attention; `read_s`: of reading
    the layer's weights from disk, 0 where they are in memory. `cut`: by how much longer the products take in so many
    parts. `beside`: for `memory` (attention) and `disk`, points (units, performance): the share of their rate that
    products lost beside it, and the share of its own rate that it kept.
    """

    weight_s: float
    attention_s: float
    read_s: float
    cut: Mapping[int, float]
    beside: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True)
class NanoOperation:
    """An operation of one nano-batch of one layer: `rows` are the fractions of the batch where it begins and ends,
    `units` the fraction of the machine's threads or multiprocessors that it holds from start to end."""

    name: str
    kind: str
    layer: int
    part: int
    rows: tuple[float, float]
    start_s: float
    end_s: float
    units: float


@dataclass(frozen=True)
class NanoPipeline:
    """The operations of some layers in order of their start. `sequential_s` is their length one after the other."""

    operations: tuple[NanoOperation, ...]
    sequential_s: float

    @property
    def length_s(self) -> float:
        """Seconds until the last operation ends."""
        return max(operation.end_s for operation in self.operations)

    @property
    def parts(self) -> Mapping[str, int]:
        """Into how many nano-batches each operation is cut."""
        return {operation.name: operation.part + 1 for operation in sorted(self.operations, key=lambda o: o.part)}

    @property
    def nano_batches(self) -> int:
        """The most parts of an operation; 1 where nothing is cut."""
        return max(self.parts.values())
