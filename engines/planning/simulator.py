"""Runs the engine's passes in simulated time, with seconds from a model of the machine.

The engine's own code decides: memory/ plans what goes where, scheduler.py forms passes (virtual_job.py), pass_ops.py
orders operations.
The machine model only says how long an operation takes. Without a device attention and products share the cores, so
both are one resource.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for, record_bytes
from engines.offload.memory.layout import OUTSIDE, WeightTile, aligned, matrix_spans
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Storage
from engines.offload.pass_ops import attention_overlaps, pass_ops, tiles_held
from engines.offload.prefill_budget import SimulatedSequence
from engines.offload.scheduled_chunk import ScheduledChunk
from engines.offload.timeline import BETWEEN, PassSums, Timeline
from engines.planning.machine import Machine, attention_rate
from engines.planning.virtual_disk import VirtualBlocks, VirtualDisk
from harness.api import DTYPE_BYTES, ModelShape, OffloadPolicy

#: Matrices of a layer before its attention: queries, keys and values.
_MATRICES_BEFORE_ATTENTION = 3
#: A pass as a scheduler forms it: the chunks of each of its batches.
Work = Sequence[Sequence[ScheduledChunk[SimulatedSequence]]]


@dataclass(frozen=True)
class PlacedModel:
    """A model as the engine would load it: weight tiles in their order, storage of the KV cache, and the memory plan.

    usage: how often a pass needs the matrices of experts, which multiply a part of its rows only.
    """

    shape: ModelShape
    tiles: Sequence[WeightTile]
    cache: Storage
    plan: MemoryPlan
    usage: ExpertUsage = field(default_factory=ExpertUsage)

    @property
    def streamed(self) -> list[bool]:
        """Which tiles are on disk."""
        return [i not in self.plan.resident for i in range(len(self.tiles))]

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights on disk."""
        return sum(tile.nbytes for i, tile in enumerate(self.tiles) if i not in self.plan.resident)

    def pass_bytes(self, rows: int) -> float:
        """Bytes of weights that a pass of `rows` rows is expected to read from disk."""
        return self.usage.expected_bytes([t for t in self.tiles if t.index not in self.plan.resident], rows)

    @property
    def disk_bytes(self) -> int:
        """Bytes of weights and KV cache on disk."""
        blocks = self.plan.disk_kv_blocks * self.shape.num_layers * record_bytes(self.shape, self.cache)
        return blocks + self.streamed_bytes


@dataclass(frozen=True)
class _SimulatedPass:
    """How long a pass took, its sums, and the state in which it left disk and ring."""

    seconds: float
    sums: PassSums
    end_state: tuple[float, ...]


class Simulator:
    """One model, or one stage's layers of it, on one machine under one policy: runs passes in virtual time."""

    def __init__(self, placed: PlacedModel, policy: OffloadPolicy, machine: Machine) -> None:
        self.placed = placed
        self.policy = policy
        self.machine = machine
        self._streamed = placed.streamed
        spans = matrix_spans(placed.tiles)
        layers = placed.shape.num_layers
        files = [placed.tiles[span.start].file for span in spans]  # one for each layer
        per_layer = sum(not file.startswith(OUTSIDE) for file in files) // layers  # the head is a matrix too
        attends = [layer * per_layer + _MATRICES_BEFORE_ATTENTION for layer in range(layers)]
        #: By the last tile before it, the layer whose attention follows.
        self._attends = {spans[i - 1].stop - 1: layer for layer, i in enumerate(attends)}
        #: The last tile of each layer but the last.
        self._ends = {spans[layer * per_layer - 1].stop - 1 for layer in range(1, layers)}
        slots = min(placed.plan.slots, sum(self._streamed))
        overlapped = policy.nano_count > 1 and policy.nano_overlap
        overlaps = attention_overlaps(spans, files, attends, self._streamed, slots) if overlapped else ()
        order = policy.nano_order
        if order and tiles_held(pass_ops(self._streamed, spans, order.nano_batches, overlaps, order)) >= max(1, slots):
            order = None
        #: The operations of a pass by its number of batches.
        self._pass_ops = cache(partial(pass_ops, self._streamed, spans, overlaps=overlaps, order=order))
        #: The share of a pass's rows that each expert's matrix multiplies.
        self._shares = placed.usage.row_shares()
        #: By rows of a pass, the probability that it needs each tile.
        self._likelihood_of = cache(partial(placed.usage.read_probabilities, placed.tiles))
        self._likelihood: Sequence[float] = ()
        self._product_seconds: dict[tuple[tuple[int, int], int, int], float] = {}  # by tile shape, bytes and rows
        self.timeline = Timeline()
        self._now = 0.0  # when the cores are free
        self._disk = VirtualDisk(machine.profile.disk.read, machine.profile.disk.write, self.timeline)
        record = record_bytes(placed.shape, placed.cache)
        self._blocks = VirtualBlocks(self._disk, layers, record, policy.overlap) if placed.plan.disk_kv_blocks else None
        self._counted_blocks: dict[SimulatedSequence, tuple[int, int]] = {}  # filled ones, and those of them on disk
        self._offloaded_share = policy.activations[2] if policy.activations else 0.0
        self._free_slots: deque[float] = deque()  # when slots of the ring became free, in the order of their reuse
        self._loads = 0
        self._passes: dict[Hashable, _SimulatedPass] = {}  # by all that decides how a pass goes

    def run_pass(self, work: Work, ready: float) -> tuple[float, float]:
        """Runs a pass as soon as its input is there, at time `ready`, and the one before it is done; returns when it
        began and when it ended."""
        start = self._now = max(self._now, ready)
        self._pass(work)
        return start, self._now

    def _pass(self, batches: Work) -> None:
        rows = [sum(chunk.count for chunk in batch) for batch in batches]
        logits_rows = [sum(len(chunk.sequence.logits_positions(chunk.count)) for chunk in batch) for batch in batches]
        attention = [sum(map(self._attention_s, batch)) for batch in batches]
        if self._blocks:
            filled, written = self._blocks_on_disk(chunk for batch in batches for chunk in batch)
            self._blocks.start(filled, written, len(batches), self._now)
            self._simulate(rows, logits_rows, attention)
            return
        # without KV blocks on disk, passes of the same work that start in the same state also end in the same state
        key = (*rows, *logits_rows, *attention, *self._state())
        if key in self._passes:
            known = self._passes[key]
            self._now += known.seconds
            self._set_state(known.end_state)
            self.timeline.count(known.sums)
        else:
            start = self._now
            sums = self._simulate(rows, logits_rows, attention)
            self._passes[key] = _SimulatedPass(self._now - start, sums, self._state())

    def _state(self) -> tuple[float, ...]:
        """When disk and ring slots become free, relative to now, in whole nanoseconds; empty if nothing streams."""
        if not self._free_slots:
            return ()
        return tuple(round(t - self._now, 9) for t in (self._disk.free, *self._free_slots))

    def _set_state(self, state: tuple[float, ...]) -> None:
        if not state:
            return
        disk, *slots = (t + self._now for t in state)
        self._loads += len(slots) - len(self._free_slots)
        self._disk.free = disk
        self._free_slots = deque(slots)

    def _simulate(self, rows: Sequence[int], logits_rows: Sequence[int], attention: Sequence[float]) -> PassSums:
        """Simulates a pass operation by operation.

        By batch: its rows, those of them that need logits, and the seconds of its attention in one layer.
        """
        batches = len(rows)
        self._likelihood = self._likelihood_of(sum(rows))
        slowdown, self._disk.read_slowdown = self._contention(rows, logits_rows)
        arrivals: dict[int, float] = {}
        ops = self._pass_ops(batches)
        attended = {op.tile for op in ops if op.kind == "attend"}
        for op in ops:
            tile = self.placed.tiles[op.tile]
            if op.kind == "load":
                arrivals[op.tile] = self._load(tile)
            elif op.kind == "multiply":
                counts = logits_rows if tile.file.startswith(OUTSIDE) else rows
                count = sum(count for batch, count in enumerate(counts) if op.includes(batch))
                self._wait(arrivals.get(op.tile, 0.0))
                tiles = self.placed.tiles[op.tile : op.tile + op.count]
                self._compute(tile.matrix, slowdown * sum(self._product(tile, count) for tile in tiles))
                if op.tile in arrivals and op.last:
                    self._free_slots.append(self._now)
            elif op.kind == "attend" or (op.tile in self._attends and op.tile not in attended):
                # all work between the products of a layer is counted here, once
                self._compute(BETWEEN, self.machine.elementwise_s(rows[op.batch], self.placed.shape.hidden))
                self._attend(self._attends[op.tile], attention[op.batch])
            elif op.tile in self._ends:
                self._offload_activations(rows[op.batch])
        return self.timeline.end_pass(sum(rows))

    def _attend(self, layer: int, seconds: float) -> None:
        if self._blocks:
            self._wait(self._blocks.staged(layer, self._now))
        start = self._now
        self._compute(BETWEEN, seconds)
        self.timeline.add("attention", "attention", start, self._now)
        if self._blocks:
            self._wait(self._blocks.leave(layer, self._now))

    def _offload_activations(self, rows: int) -> None:
        """Writes a batch's activations to disk between two layers and reads them back; nothing computes meanwhile."""
        width = self.placed.shape.hidden * DTYPE_BYTES[self.machine.host.dtype]
        nbytes = aligned(round(self._offloaded_share * rows) * width)
        written = self._disk.write("activations", "write", nbytes, self._now)
        self._now = self._disk.read("activations", "read", nbytes, written)

    def _blocks_on_disk(self, chunks: Iterable[ScheduledChunk[SimulatedSequence]]) -> tuple[int, int]:
        """How many blocks on disk are filled, and how many of them a pass writes; no two sequences share one."""
        filled = written = 0
        for chunk in chunks:
            sequence, cached = chunk.sequence, chunk.cached
            filled += self._filled_on_disk(sequence)
            new = sequence.block_table[cached // BLOCK_SIZE : blocks_for(cached + chunk.count)]
            written += self._count_on_disk(new)
        return filled, written

    def _filled_on_disk(self, sequence: SimulatedSequence) -> int:
        """Counts what was filled since the last pass: counting all of a long prompt's blocks for each of its chunks
        would take time by the square of its length."""
        filled = blocks_for(sequence.cached)
        known, on_disk = self._counted_blocks.get(sequence, (0, 0))
        if known > filled:  # preempted meanwhile: its blocks are others
            known = on_disk = 0
        on_disk += self._count_on_disk(sequence.block_table[known:filled])
        self._counted_blocks[sequence] = filled, on_disk
        return on_disk

    def _count_on_disk(self, blocks: Sequence[int]) -> int:
        return sum(block >= self.placed.plan.kv_blocks for block in blocks)

    def _contention(self, rows: Sequence[int], logits_rows: Sequence[int]) -> tuple[float, float]:
        """Factors by which products and reads from disk slow down in a pass, as they share the memory's bandwidth."""
        host, disk = self.machine.host, self.machine.profile.disk
        tiles = self.placed.tiles
        reads = sum(t.span * self._likelihood[t.index] for t in tiles if self._streamed[t.index]) / disk.read
        if not reads or not self.policy.overlap:
            return 1.0, 1.0
        products = sum(
            self._product(tile, sum(logits_rows if tile.file.startswith(OUTSIDE) else rows)) for tile in tiles
        )
        return (
            _slowed(products, host.beside_disk or 1.0, reads, disk.beside_products or 1.0),
            _slowed(reads, disk.beside_products or 1.0, products, host.beside_disk or 1.0),
        )

    def _load(self, tile: WeightTile) -> float:
        """When a tile arrives, read as soon as the disk and a slot of the ring are free."""
        free = self._free_slots.popleft() if self._loads >= self.placed.plan.slots else 0.0
        self._loads += 1
        if not self.policy.overlap:
            free = self._now
        return self._disk.read("load", tile.matrix, round(tile.span * self._likelihood[tile.index]), free)

    def _wait(self, until: float) -> None:
        if until > self._now:
            self.timeline.add("wait", "wait", self._now, until)
            self._now = until

    def _compute(self, name: str, seconds: float) -> None:
        self.timeline.add("compute", name, self._now, self._now + seconds)
        self._now += seconds

    def _product(self, tile: WeightTile, rows: int) -> float:
        if not rows:
            return 0.0
        if (share := self._shares.get(tile.matrix)) is not None:  # the mean over passes that need it, and others
            likelihood = self._likelihood[tile.index]
            rows = max(1, round(rows * share / max(likelihood, 1e-9)))
            return likelihood * self._rows_product(tile, rows)
        return self._rows_product(tile, rows)

    def _rows_product(self, tile: WeightTile, rows: int) -> float:
        """Seconds of a tile's product with so many rows."""
        key = (tile.shape, tile.nbytes, rows)
        if key not in self._product_seconds:
            values = tile.shape[0] * tile.shape[1]
            self._product_seconds[key] = self.machine.tile_s(rows, values, tile.nbytes, tile.stored)
        return self._product_seconds[key]

    def _attention_s(self, chunk: ScheduledChunk[SimulatedSequence]) -> float:
        """Seconds of one sequence's attention in one layer."""
        shape, seen = self.placed.shape, chunk.sequence.cached + chunk.count
        new_values = 2 * chunk.count * shape.num_kv_heads * shape.head_dim
        storing = self.machine.store_kv_s(new_values, self.policy.kv_bits)
        storing += self.machine.host.sequence_call_s or 0.0
        if chunk.count > 1:
            pairs = chunk.count * (chunk.sequence.cached + chunk.count / 2)
            flops = 4 * pairs * shape.num_heads * shape.head_dim
            return storing + self.machine.prefill_attention_s(flops, self.policy.kv_bits)
        stored = 2 * seen * shape.num_kv_heads * self.placed.cache.row_bytes(shape.head_dim)
        return storing + stored / attention_rate(self.machine.host, self.policy.kv_bits)


def _slowed(seconds: float, share: float, other: float, other_share: float) -> float:
    """Factor by which work of `seconds` slows down that keeps `share` of its rate until `other` work, begun with it and
    slowed to `other_share` itself, is done."""
    return min(1 / share, 1 + (1 - share) * other / other_share / seconds) if seconds else 1.0
