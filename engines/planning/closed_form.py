"""The throughput of a policy in closed form: what each half layer asks of each resource, and how an engine overlaps it.

Source: FlexGen (Sheng et al. 2023), appendix A.3, with rooflines for its constants, the schedule's own overlap for its
one maximum, and LM-Offload's terms for quantization (Wu et al. 2024, section 3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Generic, Protocol, Self, TypeVar

from engines.planning.engine_cost_models import EngineCostModel, realised
from engines.planning.machine import Machine, attention_rate, unpack_rate
from engines.planning.workload import (
    VALUE_BYTES,
    Sublayer,
    cache_bytes,
    cache_values,
    weight_bytes,
)
from harness.api import ModelShape, OffloadPolicy


@dataclass(frozen=True)
class Seconds:
    """Of each resource: the device's and the host's arithmetic, copies up and down, the disk."""

    device: float = 0.0
    host: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    disk: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: Seconds) -> Seconds:
        return self + other * -1

    def __mul__(self, times: float) -> Seconds:
        return Seconds(*(value * times for value in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        return (self.device, self.host, self.h2d, self.d2h, self.disk)


RESOURCES = ("device", "host", "h2d", "d2h", "disk")
_ALL, _STREAMS = range(5), (2, 3, 4)


@dataclass(frozen=True)
class Pass:
    """What one batch computes in a pass: new `tokens`, each of which sees `context` others on average. `wanted` of them
    give a token. Of a prompt they see each other, else what is cached of as many sequences."""

    tokens: float
    context: float
    wanted: float
    prefill: bool


class Layers:
    """A model's halves of layers under a policy, as seconds of each resource."""

    def __init__(
        self,
        shape: ModelShape,
        policy: OffloadPolicy,
        machine: Machine,
        style: EngineCostModel,
        read: float | None = None,
    ) -> None:
        """`read`: bytes/s at which what is on disk comes, if not at the disk's own rate."""
        assert policy.weights is not None
        assert policy.cache is not None
        assert policy.activations is not None
        self._shape = shape
        self._policy = policy
        self._machine = machine
        self._style = style
        self._weights, self._cache, self._activations = policy.weights, policy.cache, policy.activations
        disk = machine.profile.disk
        self._read = read or disk.read
        self._write = disk.write
        self._value = cache_values(shape)

    def load(self, part: Sublayer) -> Seconds:
        """Of a part's weights that are not where they are multiplied."""
        _, host, disk = realised(part, self._weights, self._style)
        size = weight_bytes(part, self._policy)
        link = self._up((host + disk) * size, self._style.pinned_weights)
        if self._policy.weight_bits < 16 and part.quantized and self._style.packed_load:
            link = max(link, (host + disk) * size / self._style.packed_load)
        return Seconds(h2d=link, disk=disk * size / self._read)

    def unpack(self, part: Sublayer) -> Seconds:
        """Of a part's weights of fewer bits."""
        if self._policy.weight_bits == 16 or not part.quantized:
            return Seconds()
        return Seconds(device=self._unpacked(part.params, self._policy.weight_bits, self._style.unpack_bytes))

    def batch(self, part: Sublayer, works: Sequence[Pass]) -> Seconds:
        """One batch's arithmetic and what it moves, without weights; its works share their products."""
        rows = sum(work.wanted if part.last else work.tokens for work in works) * part.met
        spent = Seconds(
            device=self._machine.products(rows, part.params, part.params * VALUE_BYTES) + self._style.slot_s
        )
        for work in works:
            spent += self._moved(part, work)
            if part.attends:
                spent += self._attention(work)
        return spent

    def _moved(self, part: Sublayer, work: Pass) -> Seconds:
        """Activations that enter and leave a part."""
        _, host, disk = self._activations
        size = work.tokens * self._shape.hidden * VALUE_BYTES
        if part.last:
            return Seconds()
        away = (host + disk) * size
        moved = Seconds(h2d=self._up(away, True), d2h=self._down(away, True))
        return moved + Seconds(disk=disk * size / self._read + disk * size / self._write)

    def _attention(self, work: Pass) -> Seconds:
        _, host, disk = self._cache
        stored = cache_bytes(self._shape, self._policy)
        away, new = host + disk, work.tokens * stored
        spent = Seconds(d2h=self._down(away * new, self._style.pinned_cache), disk=disk * new / self._write)
        if self._policy.kv_bits < 16:
            spent += Seconds(
                device=self._unpacked(work.tokens * self._value, self._policy.kv_bits, self._style.cache_bytes)
            )
        if work.prefill:
            flops = 4 * work.tokens * work.context * self._shape.num_heads * self._shape.head_dim
            return spent + Seconds(device=self._machine.prompts(flops, self._policy.kv_bits))
        old = work.tokens * work.context * stored
        spent += Seconds(disk=disk * old / self._read)
        if self._machine.has_device and not self._on_host():
            return spent + Seconds(h2d=self._up(away * old, self._style.pinned_cache)) + self._on_device(work, 1.0)
        on_host = away if self._machine.has_device else 1.0
        calls = work.tokens * self._shape.num_heads * (self._machine.host.attention_call_s or 0.0) * on_host
        seconds = on_host * old / attention_rate(self._machine.host, self._policy.kv_bits) + calls
        rows = work.tokens * self._shape.num_heads * self._shape.head_dim * VALUE_BYTES * on_host
        spent += Seconds(h2d=self._up(rows, True), d2h=self._down(3 * rows, True))
        return spent + Seconds(host=seconds) + self._on_device(work, 1 - on_host)

    def _on_host(self) -> bool:
        """Whether the host attends to what is not on the device."""
        return self._policy.cpu_attention and (self._policy.kv_bits == 16 or self._style.packed_attention)

    def _on_device(self, work: Pass, part: float) -> Seconds:
        """The device's attention to a part of the cache."""
        values = part * work.tokens * work.context * self._value
        seconds = values * VALUE_BYTES * self._style.attention_bytes / self._machine.dense.bandwidth
        if self._policy.kv_bits < 16:
            seconds += self._unpacked(values, self._policy.kv_bits, self._style.cache_bytes)
        return Seconds(device=seconds)

    def _unpacked(self, values: float, bits: int, traffic: float | None) -> float:
        processor = self._machine.dense
        return values / unpack_rate(processor, bits) if traffic is None else values * traffic / processor.bandwidth

    def _up(self, nbytes: float, pinned: bool) -> float:
        if not self._machine.has_device or not nbytes:
            return 0.0
        link = self._machine.link
        return nbytes / ((link.h2d if pinned else link.h2d_pageable) * self._style.link_share)

    def _down(self, nbytes: float, pinned: bool) -> float:
        if not self._machine.has_device or not nbytes:
            return 0.0
        link = self._machine.link
        return nbytes / ((link.d2h if pinned else link.d2h_pageable) * self._style.link_share)


class Quantity(Protocol):
    """Seconds of each resource, as numbers or as functions of a placement."""

    def __add__(self, other: Self, /) -> Self: ...

    def __mul__(self, times: float, /) -> Self: ...


Q = TypeVar("Q", bound=Quantity)


@dataclass(frozen=True)
class Slot(Generic[Q]):
    """What runs side by side, and is waited for, `count` times: each line is a quantity and those of its resources that
    take turns."""

    lines: tuple[tuple[Q, Sequence[int]], ...]
    count: float


def slots(
    costs: Sequence[tuple[Q, Q, Q]], halves: Sequence[Sublayer], batches: int, style: EngineCostModel, separate: bool
) -> list[Slot[Q]]:
    """A pass of so many equal batches: `costs` are each half's loading, unpacking, and one batch's own.

    `separate`: the host's arithmetic may run beside the device's, for different batches.
    """
    times = batches if style.unpack_each_batch else 1
    whole = [load + unpack * times + batch * batches for load, unpack, batch in costs]
    if style.overlap == "turns":
        return [Slot(((spent, _ALL),), part.count) for spent, part in zip(whole, halves, strict=True)]
    if style.overlap == "pass":
        together = reduce(operator.add, (s * part.count for s, part in zip(whole, halves, strict=True)))
        return [Slot(_beside(together, separate), 1)]
    if style.overlap == "layer":
        return [
            Slot((*((load, (i,)) for i in _STREAMS), (unpack * times + batch * batches, _ALL)), part.count)
            for (load, unpack, batch), part in zip(costs, halves, strict=True)
        ]
    found = []
    for i, part in enumerate(halves):
        # the next half's weights come with the first batch of this one
        following = costs[0 if i == 1 else min(i + 1, len(halves) - 1)][0]
        _, unpack, batch = costs[i]
        each = batch + unpack if style.unpack_each_batch else batch
        found.append(Slot(_beside(each + following, False), part.count))
        if batches > 1:
            found.append(Slot(_beside(each, False), part.count * (batches - 1)))
    return found


def _beside(spent: Q, separate: bool) -> tuple[tuple[Q, Sequence[int]], ...]:
    """Streams side by side; the host attends while its batch waits, unless another batch is at hand."""
    arithmetic: Sequence[Sequence[int]] = ((0,), (1,)) if separate else ((0, 1),)
    return tuple((spent, resources) for resources in (*arithmetic, *((i,) for i in _STREAMS)))


def pass_seconds(
    layers: Layers,
    halves: Sequence[Sublayer],
    works: Sequence[Pass],
    batches: int,
    style: EngineCostModel,
    separate: bool,
) -> tuple[float, Seconds]:
    """How long a pass takes, and what each resource works in it; see `slots`."""
    costs = [(layers.load(part), layers.unpack(part), layers.batch(part, works)) for part in halves]
    times = batches if style.unpack_each_batch else 1
    used = Seconds()
    for (load, unpack, batch), part in zip(costs, halves, strict=True):
        used += (load + unpack * times + batch * batches) * part.count
    whole = sum(
        slot.count * max(sum(spent.values[i] for i in resources) for spent, resources in slot.lines)
        for slot in slots(costs, halves, batches, style, separate)
    )
    return whole, used


def averaged(seconds: Callable[[float], float], low: float, high: float) -> float:
    """The mean of what takes so long at a context, over contexts from `low` to `high`; by Simpson's rule."""
    return (seconds(low) + 4 * seconds((low + high) / 2) + seconds(high)) / 6
