"""The engine in virtual time: its own plan, batches and operations, with seconds from a model of the machine.

Everything that decides is the engine's: tiers.py places, batching.py forms passes, schedule.py orders operations.
Only what an operation takes is asked of the machine. On a host without a device attention shares the cores with
products, so both are one resource.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for, record_bytes
from engines.offload.memory.layout import OUTSIDE, WeightTile, aligned
from engines.offload.memory.padding import padded_rows
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Plain, Storage
from engines.offload.pass_ops import Op, attention_overlaps, matrix_spans, pass_ops
from engines.offload.prefill_budget import SimulatedSequence, make_scheduler
from engines.offload.scheduler import ScheduledChunk, split
from engines.offload.timeline import BETWEEN, PassSums, Timeline
from engines.planning.machine import Machine, attention_rate, unpack_rate
from engines.planning.virtual_disk import VirtualBlocks, VirtualDisk
from harness.api import DTYPE_BYTES, HarnessError, ModelShape, OffloadPolicy


@dataclass(frozen=True)
class PlacedModel:
    """A model as the engine would load it: tiles in their order, how the cache is stored, and what goes where.

    `experts`: names of matrices that meet their share of a pass's rows only.
    """

    shape: ModelShape
    tiles: Sequence[WeightTile]
    cache: Storage
    plan: MemoryPlan
    experts: Collection[str] = ()

    @property
    def on_disk(self) -> int:
        """Bytes of weights and cache there."""
        blocks = self.plan.disk_kv_blocks * self.shape.num_layers * record_bytes(self.shape, self.cache)
        return blocks + sum(b.nbytes for b, streamed in zip(self.tiles, self.streamed, strict=True) if streamed)

    @property
    def streamed(self) -> list[bool]:
        """Which tiles are on disk."""
        return [i not in self.plan.resident for i in range(len(self.tiles))]


@dataclass(frozen=True)
class _Pass:
    """How a pass went: what it took, and where it left the disk and the ring."""

    seconds: float
    sums: PassSums
    ended: tuple[float, ...]


class Simulator:
    """One model on one machine under one policy.

    `read`: bytes/s of the disk, if less than the machine's. `attends_after`: matrices of a layer before its attention.
    """

    def __init__(
        self, placed: PlacedModel, policy: OffloadPolicy, machine: Machine, attends_after: int, read: float = math.inf
    ) -> None:
        self._placed = placed
        self._policy = policy
        self._machine = machine
        self._read = min(read, machine.profile.disk.read)
        self._streamed = placed.streamed
        spans = self._spans = matrix_spans(placed.tiles)
        layers = placed.shape.num_layers
        each = (len(spans) - 1) // layers  # the head is a matrix too
        before = [layer * each + attends_after for layer in range(layers)]
        #: Tiles after which there is a layer's attention, and those with which a layer that is not the last one ends.
        self._attends = {spans[i - 1].stop - 1: layer for layer, i in enumerate(before)}
        self._ends = {spans[layer * each - 1].stop - 1 for layer in range(1, layers)}
        groups = [str(i // each) for i in range(len(spans))]
        self._overlaps = (
            attention_overlaps(spans, groups, before, self._streamed, min(placed.plan.slots, sum(self._streamed)))
            if policy.nano_batches > 1 and policy.nano_overlap
            else ()
        )
        self._ops: dict[int, list[Op]] = {}
        self._seconds: dict[tuple[tuple[int, int], int, int], float] = {}  # of products, by tile, bytes and rows
        self.timeline = Timeline()
        self._cores = 0.0  # when they are free
        self._disk = VirtualDisk(self._read, machine.profile.disk.write, self.timeline)
        record = record_bytes(placed.shape, placed.cache)
        self._blocks = VirtualBlocks(self._disk, layers, record, policy.overlap) if placed.plan.disk_kv_blocks else None
        self._parked = policy.activations[2] if policy.activations else 0.0
        self._freed: deque[float] = deque()  # when slots became free, in the order in which they are taken again
        self._loads = 0
        self._passes: dict[Hashable, _Pass] = {}  # by all that decides how a pass goes

    def run(self, sequences: Sequence[SimulatedSequence]) -> None:
        """Runs a job; each sequence keeps the times of its tokens.

        Raises HarnessError where the cache can hold none of what is left.
        """
        plan = self._placed.plan
        pool = BlockManager(plan.kv_blocks + plan.disk_kv_blocks, plan.disk_kv_blocks)
        scheduler = make_scheduler(sequences, pool, self._policy, plan, self._balance(), plan.chunk)
        while (arrival := scheduler.next_arrival_s) is not None:
            self._cores = max(self._cores, arrival)
            parts = [p for batch in scheduler.next_pass(self._cores) for p in split(batch, self._policy.nano_batches)]
            if not parts:
                raise HarnessError("no sequence can go on: the cache is too small for what was let in")
            self._pass(parts)
            for part in (p for batch in parts for p in batch):
                if part.sequence.advance(part.count, self._cores) and not part.sequence.steps_left:
                    scheduler.finish(part.sequence)
        self.timeline.shared_tokens = scheduler.shared_tokens

    def _balance(self) -> int:
        streamed = sum(b.nbytes for b, on_disk in zip(self._placed.tiles, self._streamed, strict=True) if on_disk)
        if not streamed:
            return 1
        return int(streamed / self._read * self._machine.flops(256) / self._placed.shape.flops(1, 0, 0))

    def _pass(self, batches: Sequence[Sequence[ScheduledChunk[SimulatedSequence]]]) -> None:
        rows = [sum(part.count for part in batch) for batch in batches]
        wanted = [sum(len(part.sequence.logits_positions(part.count)) for part in batch) for batch in batches]
        attention = [sum(map(self._attention, batch)) for batch in batches]
        if self._blocks:
            self._blocks.start(*self._on_disk(p for batch in batches for p in batch), len(batches), self._cores)
            self._play(rows, wanted, attention)
            return
        # where the disk holds no blocks, passes of the same work that begin alike also go and end alike
        key = (*rows, *wanted, *attention, *self._state())
        if key in self._passes:
            known = self._passes[key]
            self._cores += known.seconds
            self._set_state(known.ended)
            self.timeline.count(known.sums)
        else:
            began = self._cores
            sums = self._play(rows, wanted, attention)
            self._passes[key] = _Pass(self._cores - began, sums, self._state())

    def _state(self) -> tuple[float, ...]:
        """When the disk and the ring's slots are free, from now on, to the nanosecond; nothing if none streams."""
        return () if not self._freed else tuple(round(t - self._cores, 9) for t in (self._disk.free, *self._freed))

    def _set_state(self, state: tuple[float, ...]) -> None:
        if not state:
            return
        disk, *freed = (t + self._cores for t in state)
        self._loads += len(freed) - len(self._freed)
        self._disk.rest_until(disk)
        self._freed = deque(freed)

    def _play(self, rows: Sequence[int], wanted: Sequence[int], attention: Sequence[float]) -> PassSums:
        """Operation by operation: a pass of batches with so many rows, of which so many meet the head, and so many
        seconds of attention in a layer."""
        batches = len(rows)
        slower = self._contended(rows, wanted)
        arrived: dict[int, float] = {}
        ops = self._ops_of(batches)
        taken = {op.tile for op in ops if op.kind == "attend"}
        for op in ops:
            tile = self._placed.tiles[op.tile]
            if op.kind == "load":
                arrived[op.tile] = self._load(tile)
            elif op.kind == "multiply":
                counts = wanted if tile.file.startswith(OUTSIDE) else rows
                count = sum(counts) if op.batch < 0 else counts[op.batch]
                self._wait(arrived.get(op.tile, 0.0))
                self._compute(tile.matrix, slower * self._product(tile, count))
                if op.tile in arrived and op.batch in (-1, batches - 1):
                    self._freed.append(self._cores)
            elif op.kind == "attend" or (op.tile in self._attends and op.tile not in taken):
                # what is between the products of a layer counts once, here
                self._compute(BETWEEN, self._machine.between(rows[op.batch], self._placed.shape.hidden))
                self._attend(self._attends[op.tile], attention[op.batch])
            elif op.tile in self._ends:
                self._park(rows[op.batch])
        return self.timeline.end_pass(sum(rows))

    def _attend(self, layer: int, seconds: float) -> None:
        if self._blocks:
            self._wait(self._blocks.staged(layer, self._cores))
        began = self._cores
        self._compute(BETWEEN, seconds)
        self.timeline.add("attention", "attention", began, self._cores)
        if self._blocks:
            self._wait(self._blocks.leave(layer, self._cores))

    def _park(self, rows: int) -> None:
        """A batch's activations go to disk between two layers, and come back; nothing else is computed meanwhile."""
        width = self._placed.shape.hidden * DTYPE_BYTES[self._machine.host.dtype]
        nbytes = aligned(round(self._parked * rows) * width)
        written = self._disk.write("activations", "write", nbytes, self._cores)
        self._cores = self._disk.read("activations", "read", nbytes, written)

    def _on_disk(self, parts: Iterable[ScheduledChunk[SimulatedSequence]]) -> tuple[int, int]:
        """How many blocks there hold something, and how many are written in a pass."""
        first = self._placed.plan.kv_blocks
        known, touched = set[int](), set[int]()
        for part in parts:
            cached, blocks = part.sequence.cached, part.sequence.block_table
            known.update(block for block in blocks[: blocks_for(cached)] if block >= first)
            new = blocks[cached // BLOCK_SIZE : blocks_for(cached + part.count)]
            touched.update(block for block in new if block >= first)
        return len(known), len(touched)

    def _contended(self, rows: Sequence[int], wanted: Sequence[int]) -> float:
        """By how much products take longer in a pass, as the disk's traffic takes its part of the memory's."""
        share = self._machine.host.beside_disk or 1.0
        pairs = list(zip(self._placed.tiles, self._streamed, strict=True))
        disk = sum(tile.span for tile, on_disk in pairs if on_disk) / self._read
        if share == 1.0 or not disk or not self._policy.overlap:
            return 1.0
        whole = sum(self._product(b, sum(wanted if b.file.startswith(OUTSIDE) else rows)) for b, _ in pairs)
        return min(1 / share, 1 + (1 - share) * disk / whole)

    def _ops_of(self, batches: int) -> list[Op]:
        if batches not in self._ops:
            overlaps = self._overlaps if batches > 1 else ()
            self._ops[batches] = pass_ops(self._streamed, self._spans, batches, overlaps)
        return self._ops[batches]

    def _load(self, tile: WeightTile) -> float:
        """When a tile will be there: read as soon as the disk and a slot are free."""
        free = self._freed.popleft() if self._loads >= self._placed.plan.slots else 0.0
        self._loads += 1
        if not self._policy.overlap:
            free = self._cores
        return self._disk.read("load", tile.matrix, tile.span, free)

    def _wait(self, until: float) -> None:
        if until > self._cores:
            self.timeline.add("wait", "wait", self._cores, until)
            self._cores = until

    def _compute(self, name: str, seconds: float) -> None:
        self.timeline.add("compute", name, self._cores, self._cores + seconds)
        self._cores += seconds

    def _product(self, tile: WeightTile, rows: int) -> float:
        if not rows:
            return 0.0
        if tile.matrix in self._placed.experts:
            rows = math.ceil(rows * self._placed.shape.forward_params / self._placed.shape.forward_stored)
        key = (tile.shape, tile.nbytes, rows)
        if key not in self._seconds:
            self._seconds[key] = self._multiplied(tile, rows)
        return self._seconds[key]

    def _multiplied(self, tile: WeightTile, rows: int) -> float:
        values = tile.shape[0] * tile.shape[1]
        counted = padded_rows(rows, DTYPE_BYTES[self._machine.host.dtype])
        seconds = self._machine.products(counted, values, tile.nbytes)
        packed = not isinstance(tile.stored, Plain)
        return seconds + (values / unpack_rate(self._machine.host, self._policy.weight_bits) if packed else 0.0)

    def _attention(self, part: ScheduledChunk[SimulatedSequence]) -> float:
        """One sequence's, in one layer."""
        shape, seen = self._placed.shape, part.sequence.cached + part.count
        new = 2 * part.count * shape.num_kv_heads * shape.head_dim
        storing = self._machine.storing(new, self._policy.kv_bits)
        if part.count > 1:
            pairs = part.count * (part.sequence.cached + part.count / 2)
            return storing + self._machine.prompts(4 * pairs * shape.num_heads * shape.head_dim, self._policy.kv_bits)
        stored = 2 * seen * shape.num_kv_heads * self._placed.cache.row_bytes(shape.head_dim)
        return storing + stored / attention_rate(self._machine.host, self._policy.kv_bits)
