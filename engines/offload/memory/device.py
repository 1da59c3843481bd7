"""Plans memory for an engine with a device: the device's memory, pinned host memory and the disk."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.common.work_memory import CONTEXT_BYTES, SLACK_BYTES
from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes, pieces
from engines.offload.memory.layout import READERS
from engines.offload.memory.pinned_pieces import pinned_bytes, wasted
from engines.offload.memory.plan import MemoryPlan, MemoryRequest, hottest, mib
from engines.offload.memory.planner import MemoryPlanner, summed
from harness.api import InfeasibleError, ModelShape, OffloadPolicy, UnsupportedError

#: Prompt tokens of a batch in a pass, least and most, where the policy sets no chunk: a device multiplies thousands of
#: rows in the time that hundreds take to load their weights.
_CHUNK = (64, 4096)
#: Values of a tile of a large model: copying one takes far longer than launching the copy, and a few fill the ring.
_TILE_VALUES = 32 << 20
#: A small model is cut into this many tiles, of no fewer values; as in layout.py.
_LEAST_VALUES, _TILES = 16 << 10, 256
#: Share of the host's free memory that may be pinned where no limit is set.
PINNED_SHARE = 0.8


@dataclass(frozen=True)
class _KVBlocks:
    """KV blocks by tier and the bytes they take there; on the device with the stages of those in host memory."""

    device: int
    host: int
    device_bytes: int
    host_bytes: int


def tile_values(shape: ModelShape) -> int:
    """Values of a weight tile, which is copied to the device as a whole."""
    return min(_TILE_VALUES, max(_LEAST_VALUES, shape.params_total // _TILES))


def pinned_sizes(request: MemoryRequest, pinned: Iterable[int], kv_blocks: int) -> list[int]:
    """Bytes of each tensor in pinned memory: read buffers for tiles on disk, tiles held, KV blocks of each layer."""
    layers = request.shape.num_layers
    buffers = [request.largest_tile] * READERS
    held = [request.tiles[i].span for i in pinned]
    return buffers + held + pieces(kv_blocks, kv_block_bytes(request.shape, request.cache) // layers) * layers


def plan_device_memory(request: MemoryRequest, policy: OffloadPolicy, device: int, host: int) -> MemoryPlan:
    """The plan for `policy` within `device` bytes of the device's memory and `host` bytes of pinned memory.

    Where the policy sets no fractions, the device holds the KV cache as far as it fits and weights in what is left;
    host memory then holds weights, and the rest of the cache in what is left of it: reading from disk is slowest.
    Blocks of sequences must fit whole, so their cache has precedence.

    Raises InfeasibleError with the missing bytes by tier, UnsupportedError for a KV cache on disk or activations that
    are not on the device.
    """
    if policy.activations not in (None, (1.0, 0.0, 0.0)):
        raise UnsupportedError("policy.activations: with a device they stay there: leave them out, or [1, 0, 0]")
    if policy.cache is not None and policy.cache[2]:
        raise UnsupportedError("policy.cache: with a device keys and values are there and in host memory, not on disk")
    return _DevicePlanner(request, policy, device - CONTEXT_BYTES, host).plan()


class _DevicePlanner(MemoryPlanner):
    def __init__(self, request: MemoryRequest, policy: OffloadPolicy, device: int, host: int) -> None:
        super().__init__(request, policy, device, _CHUNK)
        self._device = device
        self._host = host
        self._block_bytes = kv_block_bytes(request.shape, request.cache)
        #: On the device, for each block in host memory.
        self._stage_bytes = STAGES * (self._block_bytes // request.shape.num_layers)
        on_device, on_host, _ = policy.weights or (0.0, 0.0, 0.0)
        #: Bytes of weights that the policy sets for device and host; 0 where it sets none.
        self._held_weights = int(on_device * request.weight_bytes), int(on_host * request.weight_bytes)

    def plan(self) -> MemoryPlan:
        sequences = self._most_sequences()
        kv = self._place_kv(sequences, self._request.kv_blocks(sequences, self._mixed_ages))
        assert kv is not None
        if self._mixed_ages:
            at_full_length = sequences * blocks_for(self._request.max_sequence)
            kv = self._place_kv(sequences, at_full_length) or kv
        return self._finished(sequences, kv)

    def _fits(self, sequences: int) -> bool:
        return self._place_kv(sequences, self._request.kv_blocks(sequences, self._mixed_ages)) is not None

    def _place_kv(self, sequences: int, blocks: int) -> _KVBlocks | None:
        """Divides KV blocks between device and host; None if they do not fit."""
        device_room = self._device - self._fixed(sequences) - self._held_weights[0]
        host_room = self._host - self._host_fixed() - self._held_weights[1]
        if self._policy.weights is None and self._mixed_ages:
            # host memory holds weights first, but for those that the device will hold
            weights = self._request.weight_bytes
            host_room -= max(0, weights - max(0, device_room - blocks * self._block_bytes))
        if self._policy.cache is None:
            missing = max(0, blocks * self._block_bytes - device_room)
            host = math.ceil(missing / max(1, self._block_bytes - self._stage_bytes))
        else:
            host = round(self._policy.cache[1] * blocks)
        on_device = (blocks - host) * self._block_bytes + host * self._stage_bytes
        kv = _KVBlocks(blocks - host, host, on_device, host * self._block_bytes)
        if self._policy.weights is None:
            host_room = max(0, host_room)  # weights that do not fit stay on disk
        return kv if kv.device >= 0 and kv.device_bytes <= device_room and kv.host_bytes <= host_room else None

    def _fixed(self, sequences: int) -> int:
        """Bytes on the device beside the KV cache and resident weights."""
        return self._activations.bytes(sequences) + self._ring + self._other

    def _host_fixed(self) -> int:
        """Bytes of host memory beside weights and the KV cache.

        Read buffers for tiles on disk, embeddings on their way to the device and logits on their way back (which torch
        pins in powers of two), what is lost at the ends of pinned pieces, and slack.
        """
        shape, span = self._request.shape, self._request.largest_tile
        values = self._activations.chunk * shape.hidden + self._policy.block_size * shape.vocab
        transfers = 2 * values * self._request.compute_bytes
        return SLACK_BYTES + transfers + pinned_bytes([span] * READERS) + wasted(self._host, span)

    def _finished(self, sequences: int, kv: _KVBlocks) -> MemoryPlan:
        tiles, each = self._request.tiles, self._activations
        room = max(0, self._device - self._fixed(sequences) - kv.device_bytes)
        host_room = max(0, self._host - self._host_fixed() - kv.host_bytes)
        if self._policy.weights is not None:
            room, host_room = min(room, self._held_weights[0]), min(host_room, self._held_weights[1])
        probabilities = self._read_probabilities(sequences)
        resident = hottest(tiles, range(len(tiles)), room, probabilities)
        others = [i for i in range(len(tiles)) if i not in resident]
        pinned = self._pinned_tiles(others, host_room, kv, probabilities)
        on_device, on_host = (sum(tiles[i].nbytes for i in chosen) for chosen in (resident, pinned))
        parts = {"cache": kv.device_bytes, "work": each.bytes(sequences), "ring": self._ring,
                 "resident": on_device, "other": self._other}  # fmt: skip
        pinned_total = self._pinned_bytes(pinned, kv)
        note = (
            f"device memory: {summed(parts)} of {mib(self._device)}; pinned: weights {mib(on_host)} + cache "
            f"{mib(kv.host_bytes)} + passing = {mib(pinned_total)} of {mib(self._host)}"
        )
        return MemoryPlan(
            kv_blocks=kv.device,
            disk_kv_blocks=0,
            sequences=sequences,
            resident=resident,
            slots=self._slots,
            chunk=each.chunk,
            activation_bytes=parts["work"] // each.batches,
            row_bytes=each.row_bytes,
            logits_bytes=each.logits_bytes,
            total_bytes=sum(parts.values()),
            note=note,
            host_kv_blocks=kv.host,
            pinned=pinned,
            pinned_bytes=pinned_total,
        )

    def _pinned_tiles(
        self, candidates: list[int], nbytes: int, kv: _KVBlocks, probabilities: Sequence[float]
    ) -> frozenset[int]:
        """Tiles held in pinned memory: as many as fit `nbytes` and the pieces that it is allocated in."""
        while True:
            chosen = hottest(self._request.tiles, candidates, nbytes, probabilities)
            over = self._pinned_bytes(chosen, kv) - (self._host - SLACK_BYTES)
            if over <= 0 or not chosen:
                return chosen
            nbytes = max(0, nbytes - over - self._request.largest_tile)

    def _pinned_bytes(self, chosen: frozenset[int], kv: _KVBlocks) -> int:
        """Bytes of the pinned pieces that hold these tiles and the KV blocks."""
        return pinned_bytes(pinned_sizes(self._request, chosen, kv.host))

    def _refusal(self, fewest: int) -> InfeasibleError:
        blocks = self._request.kv_blocks(fewest, self._mixed_ages)
        needed = self._fixed(fewest) + self._held_weights[0] + blocks * self._stage_bytes
        needed_on_host = self._host_fixed() + self._held_weights[1] + blocks * self._block_bytes
        missing = {"device": needed - self._device, "host": needed_on_host - self._host}
        return InfeasibleError(
            f"offload needs {mib(needed)} of device memory beside {mib(CONTEXT_BYTES)} for CUDA itself, for {fewest} "
            f"sequences of {self._request.max_sequence} tokens (work {mib(self._activations.bytes(fewest))}, ring "
            f"{mib(self._ring)}, other {mib(self._other)}), and {mib(blocks * self._block_bytes)} for their cache "
            f"there or in host memory; the limits leave {mib(max(0, self._device))} and {mib(self._host)}; "
            + self._hint("use larger limits", self._policy.weights is not None),
            {tier: short for tier, short in missing.items() if short > 0},
        )
