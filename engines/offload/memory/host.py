"""Plans host memory for an engine without a device: weights, KV cache and activations within a budget."""

import math
from contextlib import suppress
from dataclasses import replace

from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes, record_bytes, stage_blocks
from engines.offload.memory.layout import READS
from engines.offload.memory.pass_time import JobPasses, PassRates
from engines.offload.memory.placement import PlacementProgram, Shares, TierBudgets
from engines.offload.memory.plan import MemoryPlan, MemoryRequest, evenly, hottest, mib
from engines.offload.memory.planner import MemoryPlanner, fewer_sequences, summed
from harness.api import InfeasibleError, OffloadPolicy

#: Share of one batch's activations that the allocator keeps after they are freed: 30 MB of 50 came and went between
#: runs.
_KEPT_ACTIVATIONS = 3 / 4
#: Prompt tokens of a batch in a pass, least and most, where the policy sets no chunk.
_CHUNK = (32, 512)
#: All weights in memory.
_ALL = (0.0, 1.0, 0.0)
#: A sweep that holds all weights may be slower by this factor than one of more sequences whose weights stream: reads
#: slow products down, which its estimate leaves out.
_ENOUGH = 0.95


def plan_host_memory(
    request: MemoryRequest, policy: OffloadPolicy, budget: int | None, rates: PassRates | None = None,
    disk: float = math.inf,
) -> MemoryPlan:  # fmt: skip
    """The plan for `policy` within `budget` bytes of host memory (None: unlimited).

    Memory left over holds weights, unless the policy sets how many; a sweep holds all of them, with fewer sequences,
    where that is faster by `rates`. The ring is as large as reads in flight need by `rates`, without any as large as
    may be, and none where all weights are held. Without a device the policy's device tier is host memory as well.

    Where the policy does not place the KV cache it is in memory; by `rates` a part of it is on disk where that is
    clearly faster (placement.py), as for a sweep of more sequences, or where it fits no other way. The disk has `disk`
    bytes for it.

    Raises InfeasibleError with the missing bytes and the nearest batch size that fits.
    """
    refusal, found = None, list[MemoryPlan]()
    try:
        found.append(_in_memory(request, policy, budget, rates))
    except InfeasibleError as exc:
        refusal = exc
    if policy.cache is None and budget is not None and rates is not None:
        all_held = found and len(found[0].resident) == len(request.tiles) and found[0].sequences == policy.block_size
        if not all_held:
            with suppress(InfeasibleError):
                found.append(_partly_on_disk(request, policy, budget, rates, disk))
    if refusal is not None and not found:
        raise refusal
    first, last = found[0], found[-1]
    return last if first.tokens_per_s <= _ENOUGH * last.tokens_per_s else first


def _in_memory(
    request: MemoryRequest, policy: OffloadPolicy, budget: int | None, rates: PassRates | None
) -> MemoryPlan:
    """The plan with the KV cache where the policy has it, else in memory."""
    if policy.weights is not None:
        return _streaming(request, policy, budget, rates)
    held = None
    with suppress(InfeasibleError):
        held = _HostPlanner(request, replace(policy, weights=_ALL), budget, rates, slots=0).plan()
    try:
        streaming = _streaming(request, policy, budget, rates)
    except InfeasibleError:
        if held is None:
            raise
        return held
    if held is None or (held.sequences < streaming.sequences and held.tokens_per_s <= _ENOUGH * streaming.tokens_per_s):
        return streaming
    return held


def _partly_on_disk(
    request: MemoryRequest, policy: OffloadPolicy, budget: int, rates: PassRates, disk: float
) -> MemoryPlan:
    """The fastest plan with the part of the KV cache on disk that it and the weights leave there. A sweep may run fewer
    sequences than the policy's.

    Raises InfeasibleError where the work of a sequence or a block does not fit."""
    size = policy.gpu_batch_size
    sizes = fewer_sequences(size) if policy.schedule == "sweep" else [size]
    best: MemoryPlan | None = None
    for size in sizes:
        of_size = replace(policy, gpu_batch_size=size)
        shares = _HostPlanner(request, of_size, budget, rates).shared(rates, disk)
        if shares is None:
            continue
        if not shares.blocks[2]:
            break
        part = shares.blocks[2] / sum(shares.blocks)
        try:
            plan = _streaming(request, replace(of_size, cache=(0.0, 1 - part, part)), budget, rates)
        except InfeasibleError:
            continue
        if best is not None and plan.tokens_per_s < best.tokens_per_s:
            break
        best = plan
    if best is None:
        raise InfeasibleError("nothing fits with keys and values on disk either", {})
    return best


def _streaming(
    request: MemoryRequest, policy: OffloadPolicy, budget: int | None, rates: PassRates | None
) -> MemoryPlan:
    """The plan with a ring for what is not held, if there may be anything."""
    if policy.weights is not None and not policy.weights[2]:
        return _HostPlanner(request, policy, budget, rates, slots=0).plan()
    if budget is None or rates is None or policy.nano_count > 1:  # nano-batches keep a layer's tiles in the ring
        return _HostPlanner(request, policy, budget, rates).plan()
    slots = READS * math.ceil(rates.read_bytes / request.largest_tile)
    plan = _HostPlanner(request, policy, budget, rates, slots).plan()
    streamed = request.streamed_bytes(plan.resident, plan.sequences)
    decode = JobPasses(request, policy, rates, plan.sequences, plan.chunk, streamed).decode_pass()
    if decode.disk_s > decode.compute_s:  # the disk should go on while a layer attends
        slots += math.ceil(decode.attention_s * rates.disk / request.largest_tile)
        with suppress(InfeasibleError):
            return _HostPlanner(request, policy, budget, rates, slots).plan()
    return plan


class _HostPlanner(MemoryPlanner):
    def __init__(
        self, request: MemoryRequest, policy: OffloadPolicy, budget: int | None, rates: PassRates | None,
        slots: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(request, policy, budget, _CHUNK, slots)
        self._budget = budget
        self._rates = rates
        self._disk_share = 0.0 if policy.cache is None else policy.cache[2]
        block = kv_block_bytes(request.shape, request.cache)
        # a block on disk is in memory a few layers at a time
        staged = STAGES * record_bytes(request.shape, request.cache)
        self._block_bytes = math.ceil((1 - self._disk_share) * block + self._disk_share * staged)
        device, host, _ = policy.weights or (0.0, 0.0, 0.0)
        self._held_weights = None if policy.weights is None else int((device + host) * request.weight_bytes)

    def plan(self) -> MemoryPlan:
        full_blocks = blocks_for(self._request.max_sequence)
        if self._budget is None:
            sequences = self._policy.block_size
            held = self._request.weight_bytes if self._held_weights is None else self._held_weights
            return self._finished(sequences * full_blocks, sequences, held, "no limit")
        sequences = self._most_sequences()
        room = self._budget - self._fixed(sequences)
        blocks = min(sequences * full_blocks, room // self._block_bytes)
        left = room - blocks * self._block_bytes
        held = left if self._held_weights is None else self._held_weights
        return self._finished(blocks, sequences, held, f"{mib(left)} left")

    def shared(self, rates: PassRates, disk: float) -> Shares | None:
        """How the policy's sequences, all of them, divide memory between their KV cache and weights; None where they do
        not fit."""
        assert self._budget is not None
        sequences = self._policy.block_size
        blocks = self._request.kv_blocks(sequences, self._mixed_ages)
        record = record_bytes(self._request.shape, self._request.cache)
        budgets = TierBudgets(
            0.0,
            self._budget - self._fixed(sequences) + (self._held_weights or 0),
            staged=stage_blocks(self._policy, blocks, self._request.max_sequence),
            host_staging_bytes=STAGES * record,
            on_disk=disk / (record * self._request.shape.num_layers),
        )
        classes = self._request.weight_classes(sequences)
        passes = JobPasses(self._request, self._policy, rates, sequences, self._activations.chunk, 0)
        block_bytes = kv_block_bytes(self._request.shape, self._request.cache)
        held = None if self._held_weights is None else (0.0, float(self._held_weights))
        shared = PlacementProgram(classes, blocks, block_bytes, budgets, passes.job_seconds, held)
        return shared.best() if shared.fits else None

    def _fixed(self, sequences: int) -> int:
        """Everything but the KV cache and weights that only fill what is left."""
        activations = self._activations.bytes(sequences) + self._kept(sequences)
        return activations + self._ring + self._other + (self._held_weights or 0)

    def _kept(self, sequences: int) -> int:
        """What the allocator keeps of one batch's activations while it serves the next."""
        if self._budget is None:
            return 0
        return int(_KEPT_ACTIVATIONS * self._activations.bytes(sequences) / self._activations.batches)

    def _needed(self, sequences: int, blocks: int) -> int:
        return self._fixed(sequences) + blocks * self._block_bytes

    def _fits(self, sequences: int) -> bool:
        assert self._budget is not None
        return self._needed(sequences, self._request.kv_blocks(sequences, self._mixed_ages)) <= self._budget

    def _finished(self, blocks: int, sequences: int, held: int, rest: str) -> MemoryPlan:
        tiles, each = self._request.tiles, self._activations
        resident = self._resident(held, sequences)
        in_memory = sum(tiles[i].nbytes for i in resident)
        activations = each.bytes(sequences)
        parts = {
            "cache": blocks * self._block_bytes,
            "work": activations,
            "ring": self._ring,
            "resident": in_memory,
            "other": self._other + self._kept(sequences),
        }
        on_disk = round(blocks * self._disk_share)
        # without a limit every token of a chunk may have logits
        unlimited = each.chunk * (each.row_bytes + each.logits_bytes)
        speed = 0.0
        if self._rates is not None:
            streamed = self._request.streamed_bytes(resident, sequences)
            passes = JobPasses(self._request, self._policy, self._rates, sequences, each.chunk, streamed)
            speed = passes.tokens_per_s()
        return MemoryPlan(
            kv_blocks=blocks - on_disk,
            disk_kv_blocks=on_disk,
            sequences=sequences,
            resident=resident,
            slots=self._slots,
            chunk=each.chunk,
            activation_bytes=unlimited if self._budget is None else activations // each.batches,
            row_bytes=each.row_bytes,
            logits_bytes=each.logits_bytes,
            total_bytes=sum(parts.values()),
            note=f"host memory: {summed(parts)}; {rest}",
            tokens_per_s=speed,
        )

    def _resident(self, held: int, sequences: int) -> frozenset[int]:
        """The tiles that `held` bytes of memory hold.

        In a sweep few of a pass's rows reach the head, whose reads may take longer than its products: so much of it is
        held first that they take as long.
        """
        tiles, probabilities = self._request.tiles, self._read_probabilities(sequences)
        first: frozenset[int] = frozenset()
        if self._rates is not None and self._policy.schedule == "sweep" and tiles:
            head = [tile for tile in tiles if tile.matrix == tiles[-1].matrix]
            seconds = self._request.shape.head_params * self._rates.value_s(sequences)
            exposed = sum(tile.nbytes for tile in head) - int(seconds * self._rates.disk)
            first = evenly(tiles, [tile.index for tile in head], max(0, min(held, exposed)))
        others = [i for i in range(len(tiles)) if i not in first]
        return first | hottest(tiles, others, held - sum(tiles[i].nbytes for i in first), probabilities)

    def _refusal(self, fewest: int) -> InfeasibleError:
        assert self._budget is not None
        blocks = fewest * blocks_for(self._request.max_sequence)
        needed = self._needed(fewest, blocks)
        held = f", weights {mib(self._held_weights)}" if self._held_weights else ""
        return InfeasibleError(
            f"offload needs {mib(needed)} for {fewest} sequences of {self._request.max_sequence} tokens (cache "
            f"{mib(blocks * self._block_bytes)}, work {mib(self._activations.bytes(fewest))}, ring {mib(self._ring)}, "
            f"other {mib(self._other + self._kept(fewest))}{held}); the budget is {mib(self._budget)}; "
            + self._hint("use a larger budget", bool(self._held_weights)),
            {"host": needed - self._budget},
        )
