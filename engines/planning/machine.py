"""Seconds that a machine takes for products, attention, dequantization and cache writes, by rooflines and curves."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from engines.offload.memory.rows import padded_rows
from engines.offload.memory.storage import Grouped, Panels, WeightStorage
from harness.api import DTYPE_BYTES, HardwareProfile, Link, Processor
from harness.common.curve import interpolate

#: Bytes that a kernel writes for a dequantized value.
_UNPACKED_BYTES = 2.0


class Machine:
    """The rates of one hardware profile. Rates that it lacks follow from its FLOP/s and memory bandwidth."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        #: What multiplies: the device, or the host where there is none.
        self.dense = profile.device or profile.host
        self.host = profile.host

    @property
    def has_device(self) -> bool:
        return self.profile.device is not None

    @cached_property
    def link(self) -> Link:
        """Between host and device; only where there is a device."""
        assert self.profile.link is not None
        return self.profile.link

    def product_s(self, rows: float, params: float, weight_bytes: float) -> float:
        """x[rows, k] times matrices of `params` values, which take `weight_bytes` of the dense processor's memory."""
        if not rows:
            return 0.0
        return max(2 * rows * params / self.flops(rows), weight_bytes / self.dense.bandwidth)

    def tile_s(self, rows: int, values: float, nbytes: float, stored: WeightStorage) -> float:
        """The product of `rows` rows and a tile of `values` weights, `stored` so in `nbytes`, in a host's pass."""
        padded = rows if isinstance(stored, Panels) else padded_rows(rows, DTYPE_BYTES[self.host.dtype])
        grouped = stored.grouped if isinstance(stored, Panels) else stored if isinstance(stored, Grouped) else None
        if grouped is not None:  # at few rows the rates are those of reading 16-bit weights, of which these are a part
            seconds = 2 * padded * values / self.flops(math.inf) + values / unpack_rate(self.host, grouped.bits)
        elif isinstance(stored, Panels) and stored.exact12:
            seconds = max(self._exact12_s(rows, values), nbytes / self.host.bandwidth)
        else:
            seconds = self.product_s(padded, values, nbytes)
        return seconds / (self.host.in_passes or 1.0)

    def _exact12_s(self, rows: int, values: float) -> float:
        if self.host.flops_exact12:
            return 2 * rows * values / interpolate(self.host.flops_exact12, rows)
        return 2 * rows * values / self.flops(rows) + values / unpack_rate(self.host, 12)

    def flops(self, rows: float) -> float:
        """FLOP/s of products of `rows` rows."""
        return interpolate(self.dense.flops, rows)

    def prefill_attention_s(self, flops: float, kv_bits: int) -> float:
        """Attention of prompts that needs `flops` for the positions that each token may see.

        Without a measured rate, as libraries compute it: masked positions as well, in batched products.
        """
        if self.dense.prompts:
            return flops / interpolate(self.dense.prompts, kv_bits)
        return 2 * flops / (self.dense.batched_flops or self.flops(math.inf) / 2)

    def store_kv_s(self, values: float, kv_bits: int) -> float:
        """Quantizes keys and values into the host's KV cache; no time if not measured."""
        return values / interpolate(self.host.cached, kv_bits) if self.host.cached else 0.0

    def elementwise_s(self, rows: float, hidden: int) -> float:
        """What a pass of `rows` rows does between the products of a layer, on the host."""
        each = rows * hidden / self.host.elementwise if self.host.elementwise else 0.0
        return each + (self.host.layer_call_s or 0.0)


def attention_rate(processor: Processor, kv_bits: int) -> float:
    """Stored bytes/s of the KV cache that decode attention reads; the memory's bandwidth if not measured."""
    return interpolate(processor.attention, kv_bits) if processor.attention else processor.bandwidth


def unpack_rate(processor: Processor, bits: float) -> float:
    """Values/s that a kernel dequantizes; what the memory's bandwidth allows if not measured."""
    return processor.dequantize or processor.bandwidth / (_UNPACKED_BYTES + bits / 8)


def faster(host: Processor, factor: float) -> Processor:
    """The host with cores that are `factor` times as fast, and the same memory."""

    def scaled(curve: Mapping[str, float]) -> dict[str, float]:
        return {at: factor * rate for at, rate in curve.items()}

    return replace(
        host,
        flops=scaled(host.flops),
        flops_exact12=scaled(host.flops_exact12),
        prompts=scaled(host.prompts),
        cached=scaled(host.cached),
        dequantize=host.dequantize and factor * host.dequantize,
        elementwise=host.elementwise and factor * host.elementwise,
        layer_call_s=host.layer_call_s and host.layer_call_s / factor,
        sequence_call_s=host.sequence_call_s and host.sequence_call_s / factor,
        probed=scaled(host.probed),
    )
