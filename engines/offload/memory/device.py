"""Plans memory for an engine with a device: the device's memory, pinned host memory and the disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from engines.common.work_memory import CONTEXT_BYTES, SLACK_BYTES
from engines.offload.memory.expert_split import MOST_ROWS
from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes, pieces, record_bytes, stage_blocks
from engines.offload.memory.layout import READERS
from engines.offload.memory.pass_time import JobPasses, PassRates
from engines.offload.memory.pinned_pieces import pinned_bytes, wasted
from engines.offload.memory.placement import PlacementProgram, TierBudgets
from engines.offload.memory.plan import MemoryPlan, MemoryRequest, hottest, largest, mib
from engines.offload.memory.planner import MemoryPlanner, fewer_sequences, summed
from harness.api import DTYPE_BYTES, InfeasibleError, ModelShape, OffloadPolicy

#: Prompt tokens of a batch in a pass, least and most, where the policy sets no chunk: a device multiplies thousands of
#: rows in the time that hundreds take to load their weights.
_CHUNK = (64, 4096)
#: Prompt tokens of a sweep's pass at most: twice as many rows take twice as long, and as much more memory.
_MOST_STEADY = 8192
#: Values of a tile of a large model: copying one takes far longer than launching the copy, and a few fill the ring.
_TILE_VALUES = 32 << 20
#: A small model is cut into this many tiles, of no fewer values; as in layout.py.
_LEAST_VALUES, _TILES = 16 << 10, 256
#: Share of the host's free memory that may be pinned where no limit is set.
PINNED_SHARE = 0.8
#: Share of a device's memory for the stages of KV blocks below it: a batch that has more goes through them in parts.
_STAGE_SHARE = 1 / 16
#: Layers that the ring has room for where the host attends for one nano-batch while another is multiplied: that takes
#: about as long as the link needs for a layer, and one nano-batch may be a layer ahead of the other.
_LAYERS_AHEAD = 2
#: Blocks that sequences may grow into at full length are held unless they slow the job by more than this.
_GROWTH = 0.99


@dataclass(frozen=True)
class _KVBlocks:
    """KV blocks by tier and the bytes they take there, with `stage` blocks in each stage for those below the device,
    and `pinned_stage` for those on disk. `tokens_per_s`: with weights in what is left; 0 without rates."""

    device: int
    host: int
    disk: int
    stage: int
    pinned_stage: int
    device_bytes: int
    host_bytes: int
    tokens_per_s: float = 0.0


def tile_values(shape: ModelShape) -> int:
    """Values of a weight tile, which is copied to the device as a whole."""
    return min(_TILE_VALUES, max(_LEAST_VALUES, shape.params_total // _TILES))


def pinned_sizes(request: MemoryRequest, pinned: Iterable[int], kv_blocks: int, staged: int = 0) -> list[int]:
    """Bytes of each tensor in pinned memory: read buffers for tiles on disk, tiles held, KV blocks of each layer, and
    stages of so many blocks for those on disk."""
    layers = request.shape.num_layers
    buffers = [request.largest_tile] * READERS
    held = [request.tiles[i].span for i in pinned]
    stages = [staged * record_bytes(request.shape, request.cache)] * (STAGES if staged else 0)
    return buffers + held + stages + pieces(kv_blocks, kv_block_bytes(request.shape, request.cache) // layers) * layers


def plan_device_memory(
    request: MemoryRequest, policy: OffloadPolicy, device: int, host: int, rates: PassRates | None = None,
    disk: float = math.inf,
) -> MemoryPlan:  # fmt: skip
    """The plan for `policy` within `device` bytes of the device's memory and `host` bytes of pinned memory.

    Where the policy does not place the KV cache, it goes where it and the weights together save most time by `rates`
    (placement.py), on device, in host memory and on disk, which has `disk` bytes for it. A sweep then runs as many
    sequences as are fastest so, and takes as many prompt tokens in a pass.

    Without rates the device holds the cache as far as it fits and weights in what is left. Host memory then holds the
    rest of the cache of blocks of sequences, and weights in what is left of it. For a sweep it holds weights first, as
    each of their bytes is read in every pass, and of the cache only what is filled; where it cannot hold all weights,
    more sequences share the reading of the others, so the cache may go to disk.

    Raises InfeasibleError with the missing bytes by tier.
    """
    planner = _DevicePlanner(request, policy, _Limits(device - CONTEXT_BYTES, host, disk), rates)
    try:
        plan = planner.plan()
    except InfeasibleError:
        if policy.prefill_chunk is not None:
            raise
        # before a batch is refused, prompts take smaller chunks
        chunk = largest(planner.chunk, lambda n: planner.with_chunk(n).fits_at_all)
        if chunk < _CHUNK[0]:
            raise
        return planner.with_chunk(chunk).plan()
    if planner.steady_chunk > planner.chunk:
        with suppress(InfeasibleError):
            return max(plan, planner.with_chunk(planner.steady_chunk).plan(), key=lambda one: one.tokens_per_s)
    return plan


@dataclass(frozen=True)
class _Limits:
    """Bytes of device memory, of pinned host memory, and for KV blocks on disk."""

    device: int
    host: int
    disk: float


class _DevicePlanner(MemoryPlanner):
    """`chunk`: prompt tokens of a batch in a pass."""

    def __init__(self, request: MemoryRequest, policy: OffloadPolicy, limits: _Limits, rates: PassRates | None) -> None:
        ahead = _LAYERS_AHEAD if policy.cpu_attention and policy.schedule == "sweep" and policy.nano_count > 1 else 0
        super().__init__(request, policy, limits.device, _CHUNK, layers_ahead=ahead)
        self._limits = limits
        self._device = limits.device
        self._host = limits.host
        self._rates = rates
        self._block_bytes = kv_block_bytes(request.shape, request.cache)
        #: On the device for each block of a stage, and in host memory for each of those that come from disk: pinned, on
        #: the way to the device, and where the host attends to them besides.
        self._stage_bytes = STAGES * (self._block_bytes // request.shape.num_layers)
        self._record = record_bytes(request.shape, request.cache)
        self._attended_stage_bytes = STAGES * self._record if policy.cpu_attention else 0
        self._host_stage_bytes = STAGES * self._record + self._attended_stage_bytes
        self._stage_room = max(0, int(limits.device * _STAGE_SHARE / self._stage_bytes))
        on_device, on_host, _ = policy.weights or (0.0, 0.0, 0.0)
        #: Bytes of weights that the policy sets for device and host; 0 where it sets none.
        self._held_weights = int(on_device * request.weight_bytes), int(on_host * request.weight_bytes)

        self.chunk = self._activations.chunk

    def with_chunk(self, chunk: int) -> _DevicePlanner:
        """The same for another chunk."""
        return _DevicePlanner(self._request, replace(self._policy, prefill_chunk=chunk), self._limits, self._rates)

    @property
    def steady_chunk(self) -> int:
        """Prompt tokens of a pass that keep a sweep's sequences running, _MOST_STEADY at most; 0 where the chunk is not
        ours to choose."""
        if not (self._shares and self._mixed_ages) or self._policy.prefill_chunk is not None:
            return 0
        steady = self._policy.gpu_batch_size * self._request.mean_prompt / self._request.mean_new
        return min(_MOST_STEADY, math.ceil(steady))

    @property
    def fits_at_all(self) -> bool:
        """Whether there is a plan."""
        return self._fits(1 if self._mixed_ages else self._policy.block_size)

    def plan(self) -> MemoryPlan:
        sequences = self._most_sequences()
        if self._shares and self._mixed_ages:
            sequences = self._fastest(sequences)
        kv = self._place_kv(sequences, self._request.kv_blocks(sequences, self._mixed_ages))
        assert kv is not None
        if self._mixed_ages:
            at_full_length = sequences * blocks_for(self._request.max_sequence)
            grown = self._place_kv(sequences, at_full_length)
            if grown is not None and grown.tokens_per_s >= _GROWTH * kv.tokens_per_s:
                kv = grown
        return self._finished(sequences, kv)

    @property
    def _shares(self) -> bool:
        """Whether the cache goes where it saves most time."""
        return self._rates is not None and self._policy.cache is None

    def _fits(self, sequences: int) -> bool:
        blocks = self._request.kv_blocks(sequences, self._mixed_ages)
        if self._shares:
            return self._shared(sequences, blocks).fits
        return self._place_kv(sequences, blocks) is not None

    def _fastest(self, most: int) -> int:
        """How many sequences of a sweep, `most` at most, generate most tokens a second."""
        counts = fewer_sequences(most)

        def speed(count: int) -> float:
            kv = self._place_kv(count, self._request.kv_blocks(count, mixed_ages=True))
            return 0.0 if kv is None else kv.tokens_per_s

        best, speed_of_best = most, speed(most)
        for count in counts[1:]:
            if (found := speed(count)) < speed_of_best:
                break  # fewer share the reading of weights, and nothing waits for their cache any more
            best, speed_of_best = count, found
        return best

    def _passes(self, sequences: int) -> JobPasses:
        assert self._rates is not None
        return JobPasses(self._request, self._policy, self._rates, sequences, self._activations.chunk, 0)

    def _shared(self, sequences: int, blocks: int) -> PlacementProgram:
        """The division of memory between weights and so many KV blocks."""
        budgets = TierBudgets(
            self._device - self._fixed(sequences),
            self._host - self._host_fixed(),
            stage_blocks(self._policy, blocks, self._request.max_sequence, self._stage_room),
            self._stage_bytes,
            self._host_stage_bytes,
            self._limits.disk / (self._record * self._request.shape.num_layers),
        )
        classes = self._request.weight_classes(sequences)
        held = None if self._policy.weights is None else self._held_weights
        return PlacementProgram(classes, blocks, self._block_bytes, budgets, self._passes(sequences).job_seconds, held)

    def _place_kv(self, sequences: int, blocks: int) -> _KVBlocks | None:
        """Divides KV blocks between the tiers; None if they do not fit."""
        if self._shares:
            shared = self._shared(sequences, blocks)
            if not shared.fits:
                return None
            best = shared.best()
            _, host, disk = best.blocks
            speed = self._passes(sequences).generated / best.seconds
            return replace(self._kv_blocks(blocks, host + disk, disk), tokens_per_s=speed)
        device_room = self._device - self._fixed(sequences) - self._held_weights[0]
        host_room = self._host - self._host_fixed() - self._held_weights[1]
        to_disk = False
        if self._policy.weights is None and self._mixed_ages:
            # host memory holds weights first, but for those that the device will hold
            weights = self._request.weight_bytes
            left = host_room - max(0, weights - max(0, device_room - blocks * self._block_bytes))
            to_disk = left < 0 and not self._policy.cpu_attention
            host_room = host_room if to_disk else max(0, left)  # the stages for blocks on disk go before weights
        if self._policy.cache is None:
            lower = self._fewest_below(blocks, device_room)
            disk = lower if to_disk else 0
        else:
            lower = round((1 - self._policy.cache[0]) * blocks)
            disk = min(lower, round(self._policy.cache[2] * blocks))
        if lower > blocks or disk > lower:
            return None
        kv = self._kv_blocks(blocks, lower, disk)
        return kv if kv.device_bytes <= device_room and kv.host_bytes <= host_room else None

    def _kv_blocks(self, blocks: int, lower: int, disk: int) -> _KVBlocks:
        """So many blocks, of which some are below the device, and of these some on disk."""
        longest = self._request.max_sequence
        stage, pinned_stage = (stage_blocks(self._policy, n, longest, self._stage_room) for n in (lower, disk))
        on_device = (blocks - lower) * self._block_bytes + stage * self._stage_bytes
        on_host = (lower - disk) * self._block_bytes + pinned_stage * self._host_stage_bytes
        return _KVBlocks(blocks - lower, lower - disk, disk, stage, pinned_stage, on_device, on_host)

    def _fewest_below(self, blocks: int, room: int) -> int:
        """The fewest blocks below the device with which the others and the stages fit `room` bytes of it; more than all
        where none do."""
        if blocks * self._block_bytes <= room:
            return 0
        kept = largest(blocks, lambda n: self._kv_blocks(blocks, blocks + 1 - n, 0).device_bytes <= room)
        return blocks + 1 - kept

    def _fixed(self, sequences: int) -> int:
        """Bytes on the device beside the KV cache and resident weights."""
        return self._activations.bytes(sequences) + self._ring + self._other

    def _host_fixed(self) -> int:
        """Bytes of host memory beside weights and the KV cache.

        Read buffers for tiles on disk, embeddings on their way to the device, logits on their way back and activations
        between layers (which torch pins in powers of two), what is lost at the ends of pinned pieces, and slack.
        """
        shape, span = self._request.shape, self._request.largest_tile
        values = self._activations.chunk * shape.hidden + self._policy.block_size * shape.vocab
        if self._policy.activations is not None:
            rows = self._policy.block_size + self._policy.num_gpu_batches * self._activations.chunk
            values += round((1 - self._policy.activations[0]) * rows) * shape.hidden
        transfers = 2 * values * self._request.compute_bytes + self._host_experts_bytes()
        return SLACK_BYTES + transfers + pinned_bytes([span] * READERS) + wasted(self._host, span)

    def _host_experts_bytes(self) -> int:
        """Work memory of the host's products with experts: a tile in float32 and cast, the rows of a batch that go to
        its experts and their sum, and what one expert makes of its rows."""
        usage, shape = self._request.usage, self._request.shape
        if not self._policy.cpu_experts or not usage.experts:
            return 0
        tiles = [tile for tile in self._request.tiles if tile.matrix in usage.experts]
        largest_tile = max(math.prod(tile.shape) for tile in tiles)
        outputs: dict[str, int] = {}
        for tile in tiles:
            outputs[tile.matrix] = max(outputs.get(tile.matrix, 0), tile.stop)
        rows = self._activations.chunk + self._policy.gpu_batch_size
        return (
            largest_tile * (DTYPE_BYTES["float32"] + DTYPE_BYTES["bfloat16"])
            + rows * shape.hidden * (2 * self._request.compute_bytes + DTYPE_BYTES["float32"])
            + 2 * MOST_ROWS * (2 * max(outputs.values()) + shape.hidden) * DTYPE_BYTES["float32"]
        )

    def _finished(self, sequences: int, kv: _KVBlocks) -> MemoryPlan:
        tiles, each = self._request.tiles, self._activations
        room = max(0, self._device - self._fixed(sequences) - kv.device_bytes)
        host_room = max(0, self._host - self._host_fixed() - kv.host_bytes)
        if self._policy.weights is not None:
            room = min(room, self._held_weights[0])
        probabilities = self._read_probabilities(sequences)
        resident = hottest(tiles, range(len(tiles)), room, probabilities, self._unit)
        others = [i for i in range(len(tiles)) if i not in resident]
        if self._policy.weights is not None and self._policy.weights[2] * self._request.weight_bytes >= 1:
            # else all others, whatever is rounded
            host_room = min(host_room, self._held_weights[1])
        pinned = self._pinned_tiles(others, host_room, kv, probabilities)
        on_device, on_host = (sum(tiles[i].nbytes for i in chosen) for chosen in (resident, pinned))
        parts = {"cache": kv.device_bytes, "work": each.bytes(sequences), "ring": self._ring,
                 "resident": on_device, "other": self._other}  # fmt: skip
        pinned_total = self._pinned_bytes(pinned, kv)
        on_disk = f"; cache on disk {mib(kv.disk * self._block_bytes)}" if kv.disk else ""
        note = (
            f"device memory: {summed(parts)} of {mib(self._device)}; pinned: weights {mib(on_host)} + cache "
            f"{mib(kv.host_bytes)} + passing = {mib(pinned_total)} of {mib(self._host)}{on_disk}"
        )
        return MemoryPlan(
            kv_blocks=kv.device,
            disk_kv_blocks=kv.disk,
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
            stage_blocks=kv.stage,
            pinned_stage_blocks=kv.pinned_stage,
            tokens_per_s=kv.tokens_per_s,
            pinned=pinned,
            pinned_bytes=pinned_total,
        )

    def _pinned_tiles(
        self, candidates: list[int], nbytes: int, kv: _KVBlocks, probabilities: Sequence[float]
    ) -> frozenset[int]:
        """Tiles held in pinned memory: as many as fit `nbytes` and the pieces that it is allocated in."""
        while True:
            chosen = hottest(self._request.tiles, candidates, nbytes, probabilities, self._unit)
            attended = kv.pinned_stage * self._attended_stage_bytes
            over = self._pinned_bytes(chosen, kv) + attended - (self._host - SLACK_BYTES)
            if over <= 0 or not chosen:
                return chosen
            nbytes = max(0, nbytes - over - self._request.largest_tile)

    @property
    def _unit(self) -> Callable[[int], Hashable] | None:
        """By a tile's index, what is placed as a whole: an expert that the host may multiply. None: each tile."""
        tiles, experts = self._request.tiles, self._request.usage.experts
        return (lambda index: experts.get(tiles[index].matrix, index)) if self._policy.cpu_experts else None

    def _pinned_bytes(self, chosen: frozenset[int], kv: _KVBlocks) -> int:
        """Bytes of the pinned pieces that hold these tiles and the KV blocks."""
        return pinned_bytes(pinned_sizes(self._request, chosen, kv.host, kv.pinned_stage))

    def _refusal(self, fewest: int) -> InfeasibleError:
        blocks = self._request.kv_blocks(fewest, self._mixed_ages)
        share = self._policy.cache or (0.0, 1.0, 0.0)
        kv = self._kv_blocks(blocks, blocks - round(share[0] * blocks), min(blocks, round(share[2] * blocks)))
        needed = self._fixed(fewest) + self._held_weights[0] + kv.device_bytes
        needed_on_host = self._host_fixed() + self._held_weights[1] + kv.host_bytes
        missing = {"device": needed - self._device, "host": needed_on_host - self._host}
        fixed = self._policy.weights is not None
        elsewhere = ", or keep keys and values on disk (policy.cache)" if share[1] else ""
        return InfeasibleError(
            f"offload needs {mib(needed)} of device memory beside what CUDA itself takes, for {fewest} "
            f"sequences of {self._request.max_sequence} tokens (work {mib(self._activations.bytes(fewest))}, ring "
            f"{mib(self._ring)}, cache {mib(kv.device_bytes)}, other {mib(self._other)}), and {mib(needed_on_host)} of "
            f"host memory (cache {mib(kv.host_bytes)}); the limits leave {mib(max(0, self._device))} and "
            f"{mib(self._host)}; " + self._hint("use larger limits", fixed) + elsewhere,
            {tier: short for tier, short in missing.items() if short > 0},
        )
