"""Closed-form cost of a pass: seconds that each sublayer needs of each resource, and how an engine overlaps them.

Source: FlexGen (Sheng et al. 2023), appendix A.3, with rooflines in place of its constants and each engine's own
overlap in place of its single maximum, and LM-Offload's terms for quantization (Wu et al. 2024, section 3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Generic, Protocol, Self, TypeVar

from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import Machine, attention_rate, unpack_rate
from engines.planning.workload import VALUE_BYTES, Lengths, Sublayer, kv_bytes, kv_values, weight_bytes
from harness.api import ModelShape, OffloadPolicy


@dataclass(frozen=True)
class ResourceSeconds:
    """Busy seconds of each resource: the device's and the host's arithmetic, copies up and down, the disk."""

    device: float = 0.0
    host: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    disk: float = 0.0

    def __add__(self, other: ResourceSeconds) -> ResourceSeconds:
        return ResourceSeconds(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: ResourceSeconds) -> ResourceSeconds:
        return self + other * -1

    def __mul__(self, times: float) -> ResourceSeconds:
        return ResourceSeconds(*(value * times for value in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        return (self.device, self.host, self.h2d, self.d2h, self.disk)


RESOURCES = ("device", "host", "h2d", "d2h", "disk")
_ALL, _TRANSFERS = range(5), (2, 3, 4)


@dataclass(frozen=True)
class BatchWork:
    """What one batch computes in a pass.

    tokens: new tokens, each of which attends to `context` tokens on average: of their own prompt in `prefill`, else of
        the KV cache.
    logits_rows: how many of them need logits.
    """

    tokens: float
    context: float
    logits_rows: float
    prefill: bool


def prefill_work(batch: int, lengths: Lengths) -> BatchWork:
    """The prompts of a batch."""
    return BatchWork(batch * lengths.prompt, lengths.prompt / 2, batch, True)


def decode_work(batch: int, context: float) -> BatchWork:
    """One token of each sequence of a batch."""
    return BatchWork(batch, context, batch, False)


def mixed_work(batch: int, lengths: Lengths) -> list[BatchWork]:
    """A pass of `sweep` in its steady state: a token of each sequence, and prompts as fast as sequences end."""
    share = batch / lengths.generated
    prompts = BatchWork(batch * lengths.prompt / lengths.generated, lengths.prompt / 2, share, True)
    return [decode_work(batch, lengths.mean_cached), prompts]


class SublayerCosts:
    """Seconds of each resource that a model's sublayers need under a policy."""

    def __init__(
        self, shape: ModelShape, policy: OffloadPolicy, machine: Machine, engine: EngineCostModel,
        disk_read: float | None = None,
    ) -> None:  # fmt: skip
        """`disk_read`: bytes/s at which weights and cache on disk arrive; None for the disk's own rate."""
        assert policy.weights is not None
        assert policy.cache is not None
        assert policy.activations is not None
        self._shape = shape
        self._policy = policy
        self._machine = machine
        self._engine = engine
        self._weights, self._cache, self._activations = policy.weights, policy.cache, policy.activations
        disk = machine.profile.disk
        self._disk_read = disk_read or disk.read
        self._disk_write = disk.write
        self._kv_values = kv_values(shape)
        #: The host attends to what is not on the device.
        self._host_attends = policy.cpu_attention and (policy.kv_bits == 16 or engine.packed_attention)

    def load(self, sublayer: Sublayer) -> ResourceSeconds:
        """Loads the weights that are not in the memory where they are multiplied."""
        _, host, disk = self._engine.placed_fractions(sublayer, self._weights)
        size = weight_bytes(sublayer, self._policy)
        link = self._up((host + disk) * size, self._engine.pinned_weights)
        if self._policy.weight_bits < 16 and sublayer.quantized and self._engine.packed_load_rate:
            link = max(link, (host + disk) * size / self._engine.packed_load_rate)
        return ResourceSeconds(h2d=link, disk=disk * size / self._disk_read)

    def unpack(self, sublayer: Sublayer) -> ResourceSeconds:
        """Dequantizes the weights once."""
        bits = self._policy.weight_bits
        if bits == 16 or not sublayer.quantized:
            return ResourceSeconds()
        return ResourceSeconds(device=self._unpack_s(sublayer.params, bits, self._engine.weight_unpack_traffic))

    def batch(self, sublayer: Sublayer, works: Sequence[BatchWork]) -> ResourceSeconds:
        """One batch's arithmetic, cache and activations. `works` share their products."""
        rows = sum(work.logits_rows if sublayer.is_head else work.tokens for work in works) * sublayer.active_share
        products = self._machine.product_s(rows, sublayer.params, sublayer.params * VALUE_BYTES)
        total = ResourceSeconds(device=products + self._engine.sublayer_overhead_s)
        for work in works:
            total += self._move_activations(sublayer, work)
            if sublayer.attends:
                total += self._attention(work)
        return total

    def _move_activations(self, sublayer: Sublayer, work: BatchWork) -> ResourceSeconds:
        """Activations that enter and leave a sublayer."""
        if sublayer.is_head:
            return ResourceSeconds()
        _, host, disk = self._activations
        size = work.tokens * self._shape.hidden * VALUE_BYTES
        off_device = (host + disk) * size
        moved = ResourceSeconds(h2d=self._up(off_device, True), d2h=self._down(off_device, True))
        return moved + ResourceSeconds(disk=disk * size / self._disk_read + disk * size / self._disk_write)

    def _attention(self, work: BatchWork) -> ResourceSeconds:
        """Stores new keys and values, and attends."""
        shape, policy, machine, engine = self._shape, self._policy, self._machine, self._engine
        _, host, disk = self._cache
        token_bytes = kv_bytes(shape, policy)
        off_device, new = host + disk, work.tokens * token_bytes
        total = ResourceSeconds(
            d2h=self._down(off_device * new, engine.pinned_cache), disk=disk * new / self._disk_write
        )
        if policy.kv_bits < 16:
            packing = self._unpack_s(work.tokens * self._kv_values, policy.kv_bits, engine.cache_unpack_traffic)
            total += ResourceSeconds(device=packing)
        if work.prefill:
            flops = 4 * work.tokens * work.context * shape.num_heads * shape.head_dim
            return total + ResourceSeconds(device=machine.prefill_attention_s(flops, policy.kv_bits))
        old = work.tokens * work.context * token_bytes
        total += ResourceSeconds(disk=disk * old / self._disk_read)
        if machine.has_device and not self._host_attends:
            loaded = ResourceSeconds(h2d=self._up(off_device * old, engine.pinned_cache))
            return total + loaded + self._device_attention(work, 1.0)
        on_host = off_device if machine.has_device else 1.0
        calls = work.tokens * shape.num_heads * (machine.host.attention_call_s or 0.0) * on_host
        seconds = on_host * old / attention_rate(machine.host, policy.kv_bits) + calls
        rows = work.tokens * shape.num_heads * shape.head_dim * VALUE_BYTES * on_host
        total += ResourceSeconds(h2d=self._up(rows, True), d2h=self._down(3 * rows, True))
        return total + ResourceSeconds(host=seconds) + self._device_attention(work, 1 - on_host)

    def _device_attention(self, work: BatchWork, share: float) -> ResourceSeconds:
        """The device attends to a share of the cache."""
        values = share * work.tokens * work.context * self._kv_values
        seconds = values * VALUE_BYTES * self._engine.attention_traffic / self._machine.dense.bandwidth
        if self._policy.kv_bits < 16:
            seconds += self._unpack_s(values, self._policy.kv_bits, self._engine.cache_unpack_traffic)
        return ResourceSeconds(device=seconds)

    def _unpack_s(self, values: float, bits: int, traffic: float | None) -> float:
        processor = self._machine.dense
        return values / unpack_rate(processor, bits) if traffic is None else values * traffic / processor.bandwidth

    def _up(self, nbytes: float, pinned: bool) -> float:
        if not self._machine.has_device or not nbytes:
            return 0.0
        link = self._machine.link
        return nbytes / ((link.h2d if pinned else link.h2d_pageable) * self._engine.link_share)

    def _down(self, nbytes: float, pinned: bool) -> float:
        if not self._machine.has_device or not nbytes:
            return 0.0
        link = self._machine.link
        return nbytes / ((link.d2h if pinned else link.d2h_pageable) * self._engine.link_share)


class Quantity(Protocol):
    """Seconds of each resource, as numbers or as affine functions of a placement."""

    def __add__(self, other: Self, /) -> Self: ...

    def __mul__(self, times: float, /) -> Self: ...


Q = TypeVar("Q", bound=Quantity)


@dataclass(frozen=True)
class SyncInterval(Generic[Q]):
    """Work between two synchronisations, which occurs `count` times a pass.

    Its `lanes` run side by side, and the slowest sets the interval's length. A lane is a quantity and the resources of
    it that run one after the other.
    """

    lanes: tuple[tuple[Q, Sequence[int]], ...]
    count: float


def sync_intervals(
    costs: Sequence[tuple[Q, Q, Q]], parts: Sequence[Sublayer], batches: int, engine: EngineCostModel,
    host_beside_device: bool,
) -> list[SyncInterval[Q]]:  # fmt: skip
    """The intervals of a pass of `batches` equal batches.

    costs: of each sublayer in `parts`, its loading, its unpacking, and one batch's work.
    host_beside_device: the host attends for one batch while the device multiplies for another.
    """
    unpacked = batches if engine.unpack_each_batch else 1
    whole = [load + unpack * unpacked + batch * batches for load, unpack, batch in costs]
    if engine.overlap == "none":
        return [SyncInterval(((cost, _ALL),), part.count) for cost, part in zip(whole, parts, strict=True)]
    if engine.overlap == "pass":
        total = reduce(operator.add, (cost * part.count for cost, part in zip(whole, parts, strict=True)))
        return [SyncInterval(_lanes(total, host_beside_device), 1)]
    if engine.overlap == "layer":
        return [
            SyncInterval((*((load, (i,)) for i in _TRANSFERS), (unpack * unpacked + batch * batches, _ALL)), part.count)
            for (load, unpack, batch), part in zip(costs, parts, strict=True)
        ]
    intervals = []
    for i, part in enumerate(parts):
        # the next sublayer's weights load beside the first batch of this one
        next_load = costs[0 if i == 1 else min(i + 1, len(parts) - 1)][0]
        _, unpack, batch = costs[i]
        each = batch + unpack if engine.unpack_each_batch else batch
        intervals.append(SyncInterval(_lanes(each + next_load, False), part.count))
        if batches > 1:
            intervals.append(SyncInterval(_lanes(each, False), part.count * (batches - 1)))
    return intervals


def _lanes(cost: Q, host_beside_device: bool) -> tuple[tuple[Q, Sequence[int]], ...]:
    """Transfers side by side. The device waits while the host attends, unless there is another batch to multiply."""
    arithmetic: Sequence[Sequence[int]] = ((0,), (1,)) if host_beside_device else ((0, 1),)
    return tuple((cost, resources) for resources in (*arithmetic, *((i,) for i in _TRANSFERS)))


def pass_seconds(
    costs: SublayerCosts, parts: Sequence[Sublayer], works: Sequence[BatchWork], batches: int, engine: EngineCostModel,
    host_beside_device: bool,
) -> tuple[float, ResourceSeconds]:  # fmt: skip
    """How long a pass takes, and how long each resource is busy in it; arguments as in sync_intervals."""
    each = [(costs.load(part), costs.unpack(part), costs.batch(part, works)) for part in parts]
    unpacked = batches if engine.unpack_each_batch else 1
    busy = ResourceSeconds()
    for (load, unpack, batch), part in zip(each, parts, strict=True):
        busy += (load + unpack * unpacked + batch * batches) * part.count
    length = sum(
        interval.count * max(sum(cost.values[i] for i in resources) for cost, resources in interval.lanes)
        for interval in sync_intervals(each, parts, batches, engine, host_beside_device)
    )
    return length, busy


def mean_over(seconds: Callable[[float], float], low: float, high: float) -> float:
    """The mean of `seconds(context)` over contexts from `low` to `high`, by Simpson's rule."""
    return (seconds(low) + 4 * seconds((low + high) / 2) + seconds(high)) / 6
