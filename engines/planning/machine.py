"""Seconds that a machine takes for products, attention, unpacking and transfers, by rooflines and curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from harness.api import HardwareProfile, Link, Processor
from harness.common.curve import interpolate

#: Bytes that a kernel moves to unpack a value into 16 bits, beside the packed ones.
_UNPACKED_BYTES = 2.0


class Machine:
    """One profile's rates. What a part lacks is derived from its flops and bandwidth."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        #: Where dense products run: the device, or the host where there is none.
        self.dense = profile.device or profile.host
        self.host = profile.host
        self._curve = _points(self.dense.flops)

    @property
    def has_device(self) -> bool:
        return self.profile.device is not None

    @cached_property
    def link(self) -> Link:
        """Between host and device. Only where there is a device."""
        assert self.profile.link is not None
        return self.profile.link

    def products(self, rows: float, params: float, weight_bytes: float) -> float:
        """x[rows, k] times matrices of `params` values, which are `weight_bytes` in the dense processor's memory."""
        if not rows:
            return 0.0
        return max(2 * rows * params / self.flops(rows), weight_bytes / self.dense.bandwidth)

    def flops(self, rows: float) -> float:
        """FLOP/s of dense products."""
        return interpolate(self._curve, rows)

    def prompts(self, flops: float, bits: int) -> float:
        """A prompt's attention: products of the heads for what each token sees, with a cache of so many bits.

        Where our kernel was not measured, as libraries do it: with what a token does not see as well.
        """
        if curve := _points(self.dense.prompts):
            return flops / interpolate(curve, bits)
        return 2 * flops / (self.dense.batched_flops or self._curve[-1][1] / 2)

    def storing(self, values: float, bits: int) -> float:
        """Keys and values put into a cache of so many bits on the host."""
        curve = _points(self.host.cached)
        return values / interpolate(curve, bits) if curve else 0.0

    def between(self, rows: float, hidden: int) -> float:
        """What a pass of so many rows does between the products of a layer, on the host."""
        each = rows * hidden / self.host.elementwise if self.host.elementwise else 0.0
        return each + (self.host.layer_call_s or 0.0)


def attention_rate(processor: Processor, bits: int) -> float:
    """Bytes/s of what is stored that attention of one token reads there; the memory's bandwidth if not measured."""
    curve = _points(processor.attention)
    return interpolate(curve, bits) if curve else processor.bandwidth


def unpack_rate(processor: Processor, bits: float) -> float:
    """Values/s that a kernel unpacks there; what the memory's bandwidth allows if not measured."""
    return processor.dequantize or processor.bandwidth / (_UNPACKED_BYTES + bits / 8)


def faster(host: Processor, times: float) -> Processor:
    """A host whose cores do so many times as much in a second; its memory does what it did."""

    def scaled(curve: Mapping[str, float]) -> dict[str, float]:
        return {at: times * rate for at, rate in curve.items()}

    return replace(
        host,
        flops=scaled(host.flops),
        prompts=scaled(host.prompts),
        cached=scaled(host.cached),
        dequantize=host.dequantize and times * host.dequantize,
        elementwise=host.elementwise and times * host.elementwise,
        layer_call_s=host.layer_call_s and host.layer_call_s / times,
        probed=scaled(host.probed),
    )


def _points(curve: Mapping[str, float]) -> list[tuple[float, float]]:
    return sorted((float(at), value) for at, value in curve.items())
