"""Passes of our engine on a device in virtual time: pass_ops' operations on the streams of the CUDA backend.

What waits for what is as in weights/ring.py, kv_cache/lower_blocks.py and kv_cache/host_attention.py: a tile is read
from disk into a staging buffer once a slot of the ring is given up, and copied up once that slot's last product is
done; a batch's KV blocks of a layer come up while the one before attends, and go back behind their attention. For the
host's attention queries go down beside the device's, blocks on disk are only read, and outputs come up in the stream of
the products. Experts that the host is expected to multiply (memory/expert_split.py) are not copied; their outputs come
up at the end of the layer. Seconds of attention and of activations are the closed form's.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.kv_blocks import STAGES
from engines.offload.memory.layout import OUTSIDE, READERS, WeightTile, matrix_spans
from engines.offload.memory.plan import MemoryPlan
from engines.planning.closed_form import (
    ACTIVATIONS,
    COMPUTE,
    FROM_DISK,
    FROM_HOST,
    STORE,
    BatchWork,
    Seconds,
    SublayerCosts,
)
from engines.planning.expert_division import IN_MEMORY, ON_DEVICE, ON_DISK, divided
from engines.planning.machine import Machine
from engines.planning.pass_walk import PassWalk
from engines.planning.virtual_machine import D2H, DEVICE, DISK, H2D, HOST, VirtualMachine
from engines.planning.workload import VALUE_BYTES

#: Tiles of the ring that are simulated: neighbours on one tier count as one, as a large model has thousands.
_RING_TILES = 4


@dataclass
class _Blocks:
    """KV blocks of a batch in a layer on their way to a stage that is free from time `begin` on: so many pieces are
    left, and the last one that came was `staged` then."""

    attention: Seconds
    begin: float
    pieces: int
    staged: float = 0.0


class DevicePass(PassWalk):
    """Passes of one model under one policy, one after the other.

    `machine` is where it runs; `costs` are those of a layer's attention and activations, for a policy with all
    fractions.
    """

    def __init__(
        self, tiles: Sequence[WeightTile], plan: MemoryPlan, usage: ExpertUsage, costs: SublayerCosts, machine: Machine
    ) -> None:
        grain = max(1, plan.slots // _RING_TILES)
        where = [
            ON_DEVICE if i in plan.resident else IN_MEMORY if i in plan.pinned else ON_DISK for i in range(len(tiles))
        ]
        joined, tiers, self._sizes = joined_tiles(tiles, where, grain)
        streamed = [tier != ON_DEVICE for tier in tiers]
        slots = min(max(1, plan.slots // grain), sum(streamed))
        super().__init__(joined, streamed, costs.shape.num_layers, slots, costs.policy)
        self.machine = VirtualMachine()
        self._costs = costs
        self._rates = machine
        self._tiers = tiers
        self._layers = costs.shape.num_layers
        self._overlap = costs.policy.overlap
        self._usage, self._shares = usage, usage.row_shares()
        self._product_s = cache(self._seconds_of_product)
        self._now = 0.0  # when the device has done what was issued
        self._issued = 0.0  # up to when the calling thread had to wait for what it issues
        self._rows_ready = 0.0  # when activations that were moved are back
        # weights: the tiles in the order of their loads, when those under way arrive, and readers' buffers are free
        self._upcoming = deque(tile for tile, from_below in zip(joined, streamed, strict=True) if from_below)
        self._arrivals: deque[tuple[int, float]] = deque()  # by tile
        self._buffers: deque[float] = deque([0.0] * READERS)
        # KV blocks, by stage: when it may be overwritten, and when what it held is on disk
        self._attention: Sequence[Seconds] = ()  # by batch of this pass, of a layer
        self._activations: Sequence[Seconds] = ()
        self._loads = sum(streamed)
        self._pieces = 1  # in which a batch's blocks of a layer come, between tiles
        self._requested = 0  # how often blocks were
        self._coming: deque[_Blocks] = deque()  # those that are on their way
        self._staged: list[float] = []  # by layer and batch, when its blocks are on the device
        self._attended = 0
        self._stage_free, self._on_disk = [0.0] * STAGES, [0.0] * STAGES
        self._beside: dict[int, float] = {}  # by batch, when the host has attended
        #: Of each tile, the probability that this pass needs it: 1 but for experts.
        self._needed: Sequence[float] = [1.0] * len(joined)
        #: What the host multiplies in this pass: tiles, and its seconds by mixture.
        self._on_host: frozenset[int] = frozenset()
        self._host_s: dict[str, float] = {}
        self._mixture_of = {tile.index: of[0] for tile in joined if (of := usage.experts.get(tile.matrix))}
        self._last_of = {mixture: i for i, mixture in self._mixture_of.items()}  # a mixture's last tile
        self._experts_done: dict[str, float] = {}  # by mixture of this pass, when the host has multiplied
        self._row_bytes = costs.shape.hidden * VALUE_BYTES
        self._room = min(plan.slots, sum(self._sizes[tile.index] for tile in self._upcoming))  # slots of the ring
        self._fill(0.0, 0.0)

    def run(self, batches: Sequence[Sequence[BatchWork]]) -> float:
        """Runs a pass whose batches do these works; returns seconds since the end of the pass before."""
        start = self._now
        costs = self._costs
        self._attention = [np.sum([costs.attention(work) for work in works], axis=0) for works in batches]
        moved = [np.sum([costs.activations(work) for work in works], axis=0) for works in batches]
        self._activations = [tasks[ACTIVATIONS] for tasks in moved]
        self._staged, self._attended, self._requested = [], 0, 0
        self._pieces = max(1, round(self._loads / (self._layers * len(batches))))
        for _ in range(STAGES if self._overlap else 0):
            self._stage(start)
        rows, logits_rows = (
            [max(1, round(sum(getattr(work, name) for work in works))) for works in batches]
            for name in ("tokens", "logits_rows")
        )
        self._route(sum(rows), len(rows))
        self._walk(rows, logits_rows)
        self._now = max(self._now, self._rows_ready)
        self._issued = self._now  # the next pass needs this one's tokens
        return self._now - start

    def _route(self, rows: int, batches: int) -> None:
        """Decides which experts a pass of so many rows needs, and which of them the host multiplies."""
        if not self._usage.experts:
            return
        self._needed = self._usage.read_probabilities(self._tiles, rows)
        if self._costs.policy.cpu_experts:
            self._on_host, self._host_s = divided(
                self._tiles, self._tiers, self._needed, self._usage, self._rates, rows, batches
            )
            self._experts_done = {}

    def _fill(self, issued: float, done: float) -> None:
        """Begins to load what the ring has room for; the last product of what leaves it was issued and done then."""
        while self._overlap and self._upcoming and self._sizes[self._next_tile().index] <= self._room:
            self._fetch(self._next_tile(), issued, done)

    def _next_tile(self) -> WeightTile:
        """The next one to load."""
        while self._upcoming[0].index in self._on_host:
            self._upcoming.rotate(-1)
        return self._upcoming[0]

    def _fetch(self, tile: WeightTile, issued: float, done: float) -> None:
        """Begins to load a tile, to slots whose last product was issued and done at these times."""
        if self._upcoming[0] is tile:  # else it was passed over, when the host was to multiply it
            self._upcoming.rotate(-1)
        self._room -= self._sizes[tile.index]
        needed = self._needed[tile.index]
        if self._tiers[tile.index] == ON_DISK:
            began = max(issued, self._buffers.popleft())
            done = max(done, self.machine.run(DISK, needed * tile.span / self._rates.profile.disk.read, began))
        arrival = self._copy(H2D, needed * tile.nbytes / self._rates.link.h2d, done)
        if self._tiers[tile.index] == ON_DISK:
            self._buffers.append(arrival)
        self._arrivals.append((tile.index, arrival))
        self._bring_up()

    def _copy(self, resource: int, seconds: float, ready: float) -> float:
        """When a copy ends: a latency, and its bytes at the link's rate."""
        return self.machine.run(resource, seconds + (self._rates.link.copy_s or 0.0) if seconds else 0.0, ready)

    def _load(self, tile: WeightTile) -> float:
        loaded = bool(self._arrivals) and self._arrivals[0][0] == tile.index
        if tile.index in self._on_host:
            if loaded:  # for nothing
                self._arrivals.popleft()
                self._room += self._sizes[tile.index]
            return self._now
        if not loaded:  # nothing is loaded ahead, or other batches still need what the ring holds
            self._fetch(tile, self._now, self._now)
            return self._arrivals.pop()[1]
        return self._arrivals.popleft()[1]

    def _multiply(self, tiles: Sequence[WeightTile], rows: int, arrival: float | None, is_last: bool) -> None:
        if mixture := self._mixture_of.get(tiles[0].index):
            self._launch_experts(mixture, rows)
        self._multiply_here([tile for tile in tiles if tile.index not in self._on_host], rows, arrival, is_last)
        if mixture and tiles[-1].index == self._last_of[mixture] and mixture in self._experts_done:
            outputs = self._copy(H2D, rows * self._row_bytes / self._rates.link.h2d, self._experts_done.pop(mixture))
            self._now = max(self._now, outputs)
            self._issued = max(self._issued, self._now)

    def _launch_experts(self, mixture: str, rows: int) -> None:
        """The host begins with its experts, once their rows are there; nothing where it has begun."""
        if mixture in self._experts_done or not self._host_s.get(mixture):
            return
        down = self._copy(D2H, rows * self._row_bytes / self._rates.link.d2h, max(self._now, self._rows_ready))
        self._experts_done[mixture] = self.machine.run(HOST, self._host_s[mixture], down)

    def _multiply_here(self, tiles: Sequence[WeightTile], rows: int, arrival: float | None, is_last: bool) -> None:
        """Multiplies tiles on the device."""
        if not tiles:
            return
        start = max(self._now, self._rows_ready, arrival or 0.0)
        self._now = self.machine.run(DEVICE, sum(self._product(tile, rows) for tile in tiles), start)
        if arrival is not None:
            self._issued = max(self._issued, arrival)
            if is_last:
                self._room += self._sizes[tiles[0].index]
                self._fill(self._issued, self._now)

    def _product(self, tile: WeightTile, rows: int) -> float:
        bits = 16 if tile.file.startswith(OUTSIDE) else self._costs.policy.weight_bits
        needed, own = self._needed[tile.index], self._shares.get(tile.matrix, 1.0) * rows
        return needed * self._product_s(tile.shape[1], bits, own / needed)

    def _seconds_of_product(self, values: int, bits: int, rows: float) -> float:
        """The product of weights, which are dequantized once for all rows of a pass."""
        unpacked = self._costs.unpack_s(values, bits, self._costs.engine.weight_unpack_traffic)
        return unpacked + self._rates.product_s(rows, values, values * VALUE_BYTES)

    def _attend(self, layer: int, batch: int, beside: bool) -> None:
        attention, launches = self._attention[batch], 2 * self._costs.engine.sublayer_overhead_s  # of both sublayers
        if not self._overlap:
            self._stage(self._now)
        while len(self._staged) == self._attended:
            self._bring_up()
        start, staged = self._now, self._staged[self._attended]
        if on_host := float(attention[COMPUTE][HOST]):  # to blocks that are staged for it, if they are on disk
            queries = self._copy(D2H, float(attention[COMPUTE][D2H]), start)
            self._beside[batch] = self.machine.run(HOST, on_host, max(queries, staged))
        else:
            start = max(start, staged)
        self._now = self.machine.run(DEVICE, float(attention[COMPUTE][DEVICE]) + launches, start)
        self._write_back(attention[STORE], self._beside.get(batch, 0.0))
        if not beside and batch == len(self._attention) - 1:  # all batches launch before the first one waits
            for waiting in sorted(self._beside):
                self._await_attention(waiting)

    def _await_attention(self, batch: int) -> None:
        if batch in self._beside:
            self._issued = max(self._issued, self._beside.pop(batch))
            outputs = float(self._attention[batch][COMPUTE][H2D])
            self._now = self._copy(DEVICE, outputs, max(self._now, self._issued))

    def _stage(self, ready: float) -> None:
        """Requests the blocks of the batch after those that were, if there is one."""
        if self._requested < self._layers * len(self._attention):
            begin = max(ready, self._stage_free[self._requested % STAGES])
            self._coming.append(_Blocks(self._attention[self._requested % len(self._attention)], begin, self._pieces))
            self._requested += 1

    def _bring_up(self) -> None:
        """Moves a piece of the blocks that were requested first: copies of tiles run between those of blocks, which
        are many."""
        if not self._coming:
            return
        blocks, count = self._coming[0], self._pieces
        from_host, from_disk = blocks.attention[FROM_HOST], blocks.attention[FROM_DISK]
        copied = self._copy(H2D, float(from_host[H2D]) / count, blocks.begin)
        read = self.machine.run(DISK, float(from_disk[DISK]) / count, blocks.begin)
        blocks.staged = max(copied, self._copy(H2D, float(from_disk[H2D]) / count, read))
        blocks.pieces -= 1
        if not blocks.pieces:
            self._staged.append(self._coming.popleft().staged)

    def _write_back(self, stored: Seconds, attended: float) -> None:
        """Begins to take a batch's new keys and values down, and to disk once it has `attended`, after which its stage
        serves the next but one."""
        stage = self._attended % STAGES
        self._attended += 1
        ready = max(self._now, self._on_disk[stage]) if stored[DISK] else self._now
        self._stage_free[stage] = max(attended, self._copy(D2H, float(stored[D2H]), ready))
        self._on_disk[stage] = self.machine.run(DISK, float(stored[DISK]), self._stage_free[stage])
        if self._overlap:
            self._stage(0.0)
        else:
            self._now = self._on_disk[stage]

    def _leave_layer(self, batch: int) -> None:
        moved = self.machine.chain(self._activations[batch], (D2H, DISK, H2D), self._now)
        self._rows_ready = max(self._rows_ready, moved)
        if not self._overlap:
            self._now = moved


def joined_tiles(
    tiles: Sequence[WeightTile], tiers: Sequence[int], grain: int
) -> tuple[list[WeightTile], list[int], list[int]]:
    """The tiles, of which those of a matrix that are on one tier are joined, up to `grain` of them where they stream;
    and of each the tier, and of how many tiles it is.

    A matrix's tiles are ordered by tier: in the few milliseconds that its product takes the order hardly matters.
    """
    joined: list[WeightTile] = []
    joined_tiers: list[int] = []
    counts: list[int] = []
    for span in matrix_spans(tiles):
        for tier, group in itertools.groupby(sorted(span, key=tiers.__getitem__), key=tiers.__getitem__):
            alike = list(group)
            size = len(alike) if tier == ON_DEVICE else grain
            for first in range(0, len(alike), size):
                parts = [tiles[i] for i in alike[first : first + size]]
                values = sum(part.shape[0] * part.shape[1] for part in parts)
                nbytes = sum(part.nbytes for part in parts)
                joined.append(replace(parts[0], index=len(joined), shape=(1, values), nbytes=nbytes))
                joined_tiers.append(tier)
                counts.append(len(parts))
    return joined, joined_tiers, counts
