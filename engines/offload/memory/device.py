"""What goes where with a device: its memory, pinned host memory and the disk, decided before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engines.common.work_memory import CONTEXT_BYTES, SLACK_BYTES
from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes, pieces
from engines.offload.memory.layout import READERS
from engines.offload.memory.pinned_pieces import pinned_bytes, wasted
from engines.offload.memory.plan import (
    KEPT_SHARE,
    ActivationMemory,
    MemoryPlan,
    MemoryRequest,
    evenly,
    largest,
    mib,
    slots_within,
)
from harness.api import InfeasibleError, ModelShape, OffloadPolicy, UnsupportedError

#: Prompt tokens of a batch and pass where the policy does not say: a device multiplies thousands of rows as fast as
#: hundreds cost it in weights.
_CHUNK = (64, 4096)
#: Values of a tile of a large model: one copy of it outlasts the asking for it by far, and few make a ring.
_TILE_VALUES = 32 << 20
#: As in layout.py, of a small one: it is to have some tiles.
_LEAST_VALUES, _TILES = 16 << 10, 256
#: Without a limit the part of the memory that is free which may be pinned.
PINNED_SHARE = 0.8


@dataclass(frozen=True)
class _KVBlocks:
    """Blocks of the cache on the device and in host memory, and what they take: on the device with their stages."""

    device: int
    host: int
    device_bytes: int
    host_bytes: int


def tile_values(shape: ModelShape) -> int:
    """Values of a tile, which is copied to the device as one."""
    return min(_TILE_VALUES, max(_LEAST_VALUES, shape.params_total // _TILES))


def pinned_sizes(demand: MemoryRequest, pinned: Iterable[int], blocks: int) -> list[int]:
    """Bytes of all tensors in pinned memory: tiles on their way from disk, those held, blocks of each layer."""
    layers = demand.shape.num_layers
    passing = [max(b.span for b in demand.tiles)] * READERS
    held = [demand.tiles[i].span for i in pinned]
    return passing + held + pieces(blocks, kv_block_bytes(demand.shape, demand.cache) // layers) * layers


def plan_device_memory(demand: MemoryRequest, policy: OffloadPolicy, device: int, host: int) -> MemoryPlan:
    """The plan for `policy` within `device` bytes of the device's memory and `host` bytes of pinned memory.

    Where the policy leaves it open, keys and values are on the device as far as they fit there, and weights in what is
    left of it; then weights are in host memory, and keys and values in what is left there: what the disk gives is
    slowest. Blocks of sequences must fit whole, and so their keys and values come first; a sweep runs as many sequences
    as fit, up to its batch size. Raises InfeasibleError with the numbers, UnsupportedError for keys and values on disk
    or activations that are not on the device.
    """
    if policy.activations not in (None, (1.0, 0.0, 0.0)):
        raise UnsupportedError("policy.activations: with a device they stay there: leave them out, or [1, 0, 0]")
    if policy.cache is not None and policy.cache[2]:
        raise UnsupportedError("policy.cache: with a device keys and values are there and in host memory, not on disk")
    return _Planner(demand, policy, device - CONTEXT_BYTES, host).plan()


class _Planner:
    """One plan in the making."""

    def __init__(self, demand: MemoryRequest, policy: OffloadPolicy, device: int, host: int) -> None:
        self._demand = demand
        self._policy = policy
        self._device = device
        self._host = host
        self._sweep = policy.schedule == "sweep"
        shape = demand.shape
        self._block_bytes = kv_block_bytes(shape, demand.cache)
        self._staged = STAGES * (self._block_bytes // shape.num_layers)  # of a block whose home is host memory
        self._span = max(b.span for b in demand.tiles)
        self._slots = slots_within(device, self._span)
        self._work = ActivationMemory.within(device, demand, policy, _CHUNK)
        self._weights = sum(b.nbytes for b in demand.tiles)
        asked = policy.weights
        self._asked = None if asked is None else (int(asked[0] * self._weights), int(asked[1] * self._weights))
        self._other = demand.small_bytes + demand.cast_bytes + SLACK_BYTES + int(device * KEPT_SHARE)

    def plan(self) -> MemoryPlan:
        wanted = self._policy.block_size
        least = 1 if self._sweep else wanted
        sequences = largest(wanted, self._fits)
        if sequences < least:
            raise self._refusal(least)
        blocks = self._blocks(sequences, self._demand.blocks(sequences, self._sweep))
        assert blocks is not None
        if self._sweep and (whole := self._blocks(sequences, sequences * blocks_for(self._demand.max_sequence))):
            blocks = whole
        return self._finished(sequences, blocks)

    def _fits(self, sequences: int) -> bool:
        return self._blocks(sequences, self._demand.blocks(sequences, self._sweep)) is not None

    def _blocks(self, sequences: int, blocks: int) -> _KVBlocks | None:
        """Where so many blocks are, if there is room for them."""
        room = self._device - self._fixed(sequences) - (self._asked[0] if self._asked else 0)
        on_host = self._host - self._beside()
        if self._asked:
            on_host -= self._asked[1]
        elif self._sweep:  # weights come first, but for what the device will hold of them
            on_host -= max(0, self._weights - max(0, room - blocks * self._block_bytes))
        if self._policy.cache is None:
            lack = max(0, blocks * self._block_bytes - room)
            host = math.ceil(lack / max(1, self._block_bytes - self._staged))
        else:
            host = round(self._policy.cache[1] * blocks)
        found = _KVBlocks(
            blocks - host, host, (blocks - host) * self._block_bytes + host * self._staged, host * self._block_bytes
        )
        if self._asked is None:
            on_host = max(0, on_host)  # weights that do not fit stay on disk
        fits = found.device >= 0 and found.device_bytes <= room and found.host_bytes <= on_host
        return found if fits else None

    def _fixed(self, sequences: int) -> int:
        """What the device holds beside the cache and weights that stay."""
        return self._work.bytes(sequences) + self._slots * self._span + self._other

    def _beside(self) -> int:
        """What host memory holds beside weights and the cache: tiles on their way from disk, rows of embeddings on
        their way to the device and of logits back, pinned by torch in powers of two, and the rest."""
        shape, width = self._demand.shape, self._demand.compute_bytes
        rows = self._work.chunk * shape.hidden * width + self._policy.block_size * shape.vocab * width
        return SLACK_BYTES + 2 * rows + pinned_bytes([self._span] * READERS) + wasted(self._host, self._span)

    def _finished(self, sequences: int, blocks: _KVBlocks) -> MemoryPlan:
        tiles = self._demand.tiles
        fixed = self._fixed(sequences)
        room = self._device - fixed - blocks.device_bytes
        resident = evenly(tiles, range(len(tiles)), min(room, self._asked[0]) if self._asked else max(0, room))
        rest = [i for i in range(len(tiles)) if i not in resident]
        room = max(0, self._host - self._beside() - blocks.host_bytes)
        pinned = self._pinned(rest, min(room, self._asked[1]) if self._asked else room, blocks)
        kept, held = (sum(tiles[i].nbytes for i in chosen) for chosen in (resident, pinned))
        parts = {"cache": blocks.device_bytes, "work": self._work.bytes(sequences), "ring": self._slots * self._span,
                 "resident": kept, "other": self._other}  # fmt: skip
        words = " + ".join(f"{name} {mib(nbytes)}" for name, nbytes in parts.items())
        total = self._pinned_bytes(pinned, blocks)
        note = (
            f"device memory: {words} of {mib(self._device)}; pinned: weights {mib(held)} + cache "
            f"{mib(blocks.host_bytes)} + passing = {mib(total)} of {mib(self._host)}"
        )
        return MemoryPlan(
            kv_blocks=blocks.device,
            disk_kv_blocks=0,
            sequences=sequences,
            resident=resident,
            slots=self._slots,
            chunk=self._work.chunk,
            activation_bytes=parts["work"] // self._work.batches,
            row_bytes=self._work.row,
            logits_bytes=self._work.logits,
            total_bytes=sum(parts.values()),
            note=note,
            host_kv_blocks=blocks.host,
            pinned=pinned,
            pinned_bytes=total,
        )

    def _pinned(self, rest: list[int], nbytes: int, blocks: _KVBlocks) -> frozenset[int]:
        """Tiles that are held in pinned memory: as many as `nbytes` hold, and its pieces have room for."""
        while True:
            chosen = evenly(self._demand.tiles, rest, nbytes)
            over = self._pinned_bytes(chosen, blocks) - (self._host - SLACK_BYTES)
            if over <= 0 or not chosen:
                return chosen
            nbytes = max(0, nbytes - over - self._span)

    def _pinned_bytes(self, chosen: frozenset[int], blocks: _KVBlocks) -> int:
        """What pinned memory takes in its pieces."""
        return pinned_bytes(pinned_sizes(self._demand, chosen, blocks.host))

    def _refusal(self, sequences: int) -> InfeasibleError:
        """Why not even so many sequences fit, and what would."""
        blocks = self._demand.blocks(sequences, self._sweep)
        need = self._fixed(sequences) + (self._asked[0] if self._asked else 0) + blocks * self._staged
        batches = self._policy.num_gpu_batches
        size = 0 if self._sweep else largest(self._policy.gpu_batch_size, lambda n: self._fits(n * batches))
        hint = f"gpu_batch_size {size} would fit" if size else "use larger limits"
        if self._asked:
            hint += ", or hold a smaller part of the weights (policy.weights)"
        on_host = self._beside() + (self._asked[1] if self._asked else 0) + blocks * self._block_bytes
        lacking = {"device": need - self._device, "host": on_host - self._host}
        return InfeasibleError(
            f"offload needs {mib(need)} of device memory beside {mib(CONTEXT_BYTES)} for CUDA itself, for {sequences} "
            f"sequences of {self._demand.max_sequence} tokens (work {mib(self._work.bytes(sequences))}, ring "
            f"{mib(self._slots * self._span)}, other {mib(self._other)}), and {mib(blocks * self._block_bytes)} for "
            f"their cache there or in host memory; the limits leave {mib(max(0, self._device))} and "
            f"{mib(self._host)}; {hint}",
            {tier: short for tier, short in lacking.items() if short > 0},
        )
