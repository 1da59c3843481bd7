"""Closed-form cost of a pass: seconds that each sublayer needs of each resource, and how an engine overlaps them.

Source: FlexGen (Sheng et al. 2023), appendix A.3, with rooflines in place of its constants and each engine's own
overlap in place of its single maximum, and LM-Offload's terms for quantization (Wu et al. 2024, section 3).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import Machine, attention_rate, unpack_rate
from engines.planning.workload import VALUE_BYTES, Lengths, Sublayer, kv_bytes, kv_values, sublayers, weight_bytes
from harness.api import ModelShape, OffloadPolicy

RESOURCES = ("device", "host", "h2d", "d2h", "disk")
#: Seconds of each resource, in that order: float64 [resources], or [resources, n] for n terms of an affine function.
Seconds = npt.NDArray[np.float64]


def busy(device: float = 0.0, host: float = 0.0, h2d: float = 0.0, d2h: float = 0.0, disk: float = 0.0) -> Seconds:
    """Busy seconds of the device's and the host's arithmetic, copies up and down, and the disk."""
    return np.array([device, host, h2d, d2h, disk])


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


def prefill_work(batch: float, lengths: Lengths) -> BatchWork:
    """The prompts of a batch."""
    return BatchWork(batch * lengths.prompt, lengths.prompt / 2, batch, True)


def decode_work(batch: float, context: float) -> BatchWork:
    """One token of each sequence of a batch."""
    return BatchWork(batch, context, batch, False)


def mixed_work(batch: float, lengths: Lengths) -> list[BatchWork]:
    """A pass of `sweep` in its steady state: a token of each sequence, and prompts as fast as sequences end."""
    share = batch / lengths.generated
    prompts = BatchWork(batch * lengths.prompt / lengths.generated, lengths.prompt / 2, share, True)
    return [decode_work(batch, lengths.mean_cached), prompts]


#: What a sublayer's seconds are for: weights or KV cache that come from host memory, or from disk; arithmetic, with the
#: rows that go to the host's attention and back; new keys and values; activations before and after.
FROM_HOST, FROM_DISK, COMPUTE, STORE, ACTIVATIONS = range(5)
_TASKS = 5


def _no_tasks() -> Seconds:
    return np.zeros((_TASKS, len(RESOURCES)))


class SublayerCosts:
    """Seconds of each resource that a model's sublayers need under a policy."""

    def __init__(
        self, shape: ModelShape, policy: OffloadPolicy, machine: Machine, engine: EngineCostModel,
        disk_read: float | None = None,
    ) -> None:  # fmt: skip
        """`disk_read`: bytes/s at which weights and cache on disk arrive; None for the disk's own rate."""
        assert policy.weights and policy.cache and policy.activations
        self.shape = shape
        self.policy = policy
        self.engine = engine
        self._machine = machine
        self._weights, self._cache, self._activations = policy.weights, policy.cache, policy.activations
        disk = machine.profile.disk
        self._disk_read = disk_read or disk.read
        self._disk_write = disk.write
        self._kv_values = kv_values(shape)
        #: The host attends to what is not on the device.
        self._host_attends = policy.cpu_attention and (policy.kv_bits == 16 or engine.packed_attention)

    def load(self, sublayer: Sublayer) -> Seconds:
        """Loads the weights that are not where they are multiplied, and dequantizes them unless each batch does; by
        task [tasks, resources]."""
        _, host, disk = self.engine.placed_fractions(sublayer, self._weights)
        size, pinned = weight_bytes(sublayer, self.policy), self.engine.pinned_weights
        loaded = _no_tasks()
        loaded[FROM_HOST] = self._copied(host * size, 0, pinned)
        loaded[FROM_DISK] = self._copied(disk * size, 0, pinned) + busy(disk=disk * size / self._disk_read)
        if not self.engine.unpack_each_batch:
            loaded[COMPUTE] = self._unpack(sublayer)
        return loaded

    def batch(self, sublayer: Sublayer, works: Sequence[BatchWork]) -> Seconds:
        """One batch's arithmetic, cache and activations, in a pass of `works`, which share their products; by task
        [tasks, resources]."""
        rows = sum(work.logits_rows if sublayer.is_head else work.tokens for work in works) * sublayer.active_share
        products = self._machine.product_s(rows, sublayer.params, sublayer.params * VALUE_BYTES)
        total = _no_tasks()
        total[COMPUTE] = busy(device=products + self.engine.sublayer_overhead_s)
        if self.engine.unpack_each_batch:
            total[COMPUTE] += self._unpack(sublayer)
        for work in works:
            if not sublayer.is_head:
                total += self.activations(work)
            if sublayer.attends:
                total += self.attention(work)
        return total

    def pass_seconds(self, works: Sequence[BatchWork]) -> tuple[float, Seconds]:
        """How long a pass takes, in which each batch does `works`; and how long each resource is busy in it."""
        parts, batches = sublayers(self.shape), self.policy.num_gpu_batches
        costs = [(self.load(part).sum(axis=0), self.batch(part, works).sum(axis=0)) for part in parts]
        intervals = sync_intervals(costs, parts, batches, self.engine)
        return sum(float(max(lanes)) * count for lanes, count in intervals), _busy_in_pass(costs, parts, batches)

    def _unpack(self, sublayer: Sublayer) -> Seconds:
        bits = self.policy.weight_bits if sublayer.quantized else 16
        return busy(device=self.unpack_s(sublayer.params, bits, self.engine.weight_unpack_traffic))

    def activations(self, work: BatchWork) -> Seconds:
        """Activations that enter and leave a sublayer; by task [tasks, resources]."""
        _, host, disk = self._activations
        size = work.tokens * self.shape.hidden * VALUE_BYTES
        off_device = (host + disk) * size
        total = _no_tasks()
        total[ACTIVATIONS] = busy(disk=disk * size / self._disk_read + disk * size / self._disk_write)
        copied = self._copied(off_device, off_device)
        if self.engine.activations_wait:
            total[COMPUTE] = busy(device=copied.sum())
        else:
            total[ACTIVATIONS] += copied
        return total

    def attention(self, work: BatchWork) -> Seconds:
        """Stores new keys and values, and attends; by task [tasks, resources]."""
        shape, policy, machine, engine = self.shape, self.policy, self._machine, self.engine
        _, host, disk = self._cache
        token_bytes = kv_bytes(shape, policy)
        off_device, new = host + disk, work.tokens * token_bytes
        packing = self.unpack_s(work.tokens * self._kv_values, policy.kv_bits, engine.cache_unpack_traffic)
        total = _no_tasks()
        total[COMPUTE] = busy(device=packing)
        total[STORE] = busy(disk=disk * new / self._disk_write)
        total[STORE] += self._copied(0, off_device * new, engine.pinned_cache)
        if work.prefill:
            flops = 4 * work.tokens * work.context * shape.num_heads * shape.head_dim
            total[COMPUTE] += busy(device=machine.prefill_attention_s(flops, policy.kv_bits))
            return total
        old = work.tokens * work.context * token_bytes
        total[FROM_DISK] = busy(disk=disk * old / self._disk_read)
        if machine.has_device and not self._host_attends:
            total[FROM_HOST] = self._copied(host * old, 0, engine.pinned_cache)
            total[FROM_DISK] += self._copied(disk * old, 0, engine.pinned_cache)
            total[COMPUTE] += self._device_attention(work, 1.0)
            return total
        on_host = off_device if machine.has_device else 1.0
        seconds = on_host * old / attention_rate(machine.host, policy.kv_bits)
        if engine.head_calls:
            seconds = max(seconds, on_host * work.tokens * shape.num_heads * (machine.host.attention_call_s or 0.0))
        rows = work.tokens * shape.num_heads * shape.head_dim * VALUE_BYTES * on_host
        total[COMPUTE] += busy(host=seconds) + self._copied(rows, 3 * rows) + self._device_attention(work, 1 - on_host)
        return total

    def _device_attention(self, work: BatchWork, share: float) -> Seconds:
        """The device attends to a share of the cache."""
        values = share * work.tokens * work.context * self._kv_values
        read = values * VALUE_BYTES * self.engine.attention_traffic / self._machine.dense.bandwidth
        return busy(device=read + self.unpack_s(values, self.policy.kv_bits, self.engine.cache_unpack_traffic))

    def unpack_s(self, values: float, bits: int, traffic: float | None) -> float:
        """Seconds in which the device dequantizes, or quantizes, values of so many bits."""
        if bits == 16:
            return 0.0
        processor = self._machine.dense
        return values / unpack_rate(processor, bits) if traffic is None else values * traffic / processor.bandwidth

    def _copied(self, up: float, down: float, pinned: bool = True) -> Seconds:
        """Copies so many bytes to the device, and from it."""
        if not self._machine.has_device:
            return busy()
        link, share = self._machine.link, self.engine.link_share
        if pinned:
            return busy(h2d=up / (link.h2d * share), d2h=down / (link.d2h * share))
        if self.engine.pins_copies:
            return busy(host=up / link.h2d_pageable, h2d=up / link.h2d, d2h=down / link.d2h_pageable)
        return busy(h2d=up / link.h2d_pageable, d2h=down / link.d2h_pageable)


def sync_intervals(
    costs: Sequence[tuple[Seconds, Seconds]], parts: Sequence[Sublayer], batches: int, engine: EngineCostModel
) -> Iterator[tuple[list[Seconds], float]]:
    """The intervals between synchronisations in a pass of `batches` equal batches, and how often each occurs.

    An interval's lanes run side by side, and the slowest sets its length. `costs`: of each sublayer in `parts`, its
    loading and one batch's work.
    """
    if engine.overlap == "pass":
        yield _lanes(_busy_in_pass(costs, parts, batches), engine.parallel_attention), 1
        return
    for i, (part, (load, batch)) in enumerate(zip(parts, costs, strict=True)):
        if engine.overlap == "none":
            yield [(load + batches * batch).sum(axis=0)], part.count
        elif engine.overlap == "layer":
            unpack, _, *transfers = load
            yield [*transfers, unpack + batches * batch.sum(axis=0)], part.count
        else:
            # the next sublayer's weights load beside the first batch of this one
            next_load, _ = costs[0 if i == 1 else min(i + 1, len(parts) - 1)]
            yield _lanes(batch + next_load, False), part.count
            if batches > 1:
                yield _lanes(batch, False), part.count * (batches - 1)


def _lanes(cost: Seconds, parallel_attention: bool) -> list[Seconds]:
    """Transfers side by side. The device waits while the host attends, unless there is another batch to multiply."""
    device, host, *transfers = cost
    return [device, host, *transfers] if parallel_attention else [device + host, *transfers]


def _busy_in_pass(costs: Sequence[tuple[Seconds, Seconds]], parts: Sequence[Sublayer], batches: int) -> Seconds:
    total = np.zeros_like(costs[0][0])
    for (load, batch), part in zip(costs, parts, strict=True):
        total += part.count * (load + batches * batch)
    return total


def mean_over(seconds: Callable[[float], Seconds], low: float, high: float) -> Seconds:
    """The mean of `seconds(context)` over contexts from `low` to `high`, by Simpson's rule."""
    return (seconds(low) + 4 * seconds((low + high) / 2) + seconds(high)) / 6
