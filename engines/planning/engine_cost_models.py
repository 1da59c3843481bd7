"""Engine cost models: what an engine overlaps, copies and unpacks when. The same on every machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from engines.planning.workload import Fractions, Sublayer, by_whole_tensors, sublayers, weight_bytes
from harness.api import Bits, HarnessError, ModelShape, OffloadPolicy, Schedule

#: How transfers overlap with arithmetic. `none`: not at all. `sublayer`: a transfer runs beside one batch's sublayer,
#: then all synchronise (FlexGen). `layer`: a layer's transfers run beside that layer's arithmetic. `pass`:
#: transfers run ahead as far as a ring reaches, so the slowest resource sets the pace.
Overlap = Literal["none", "sublayer", "layer", "pass"]
#: By engine its settings, and its constants: `value`, `source`, and `fitted_on` where it was fitted.
FILE = Path(__file__).with_name("engine_cost_models.yaml")


@dataclass(frozen=True)
class EngineCostModel:
    """One engine's way of working, and the constants of its software.

    schedules, weight_bits, kv_bits: those that it has.
    weight_tiers: the tiers of which one holds all weights, in the order tried; empty where a policy divides them.
    host_attention: whether the host can attend; head_calls: by library calls for each sequence and head, whose number
        limits it where contexts are short.
    pinned_weights, pinned_cache: whether these are copied from pinned memory.
    pins_copies: whether the calling thread copies what is not pinned to pinned memory, while the device waits; weights
        are pinned where there is room for it.
    activations_wait: whether activations are copied in the stream of the products.
    direct_io: whether the disk is read past the page cache.
    unpack_each_batch: quantized weights are unpacked for each batch, not once a pass.
    packed_attention: the host attends to a quantized cache.
    parallel_attention: the host attends while the device multiplies for another batch.
    whole_tensors: a tensor of the weights, and all activations, are never divided between tiers.
    thread_control: it allots the host's threads itself (thread_control.py); otherwise the policy says how many.
    one_group_streams: a pipeline whose weights stream has one group of sequences, so that none is read twice a token.

    link_share: share of the link's bandwidth that copies reach.
    weight_unpack_traffic, cache_unpack_traffic: bytes of device memory traffic to unpack one value; None for the rate
        of a fused kernel.
    attention_traffic: bytes of device memory traffic for each byte of the 16-bit cache that attention reads.
    sublayer_overhead_s: seconds of launches and synchronisation around each batch's sublayer.
    """

    name: str
    overlap: Overlap
    schedules: Sequence[Schedule] = ("row",)
    weight_bits: Sequence[Bits] = (16,)
    kv_bits: Sequence[Bits] = (16,)
    weight_tiers: Sequence[str] = ()
    host_attention: bool = False
    head_calls: bool = False
    pinned_weights: bool = True
    pinned_cache: bool = True
    pins_copies: bool = False
    activations_wait: bool = False
    direct_io: bool = True
    unpack_each_batch: bool = False
    packed_attention: bool = True
    parallel_attention: bool = False
    whole_tensors: bool = False
    thread_control: bool = False
    one_group_streams: bool = False
    link_share: float = 1.0
    weight_unpack_traffic: float | None = None
    cache_unpack_traffic: float | None = None
    attention_traffic: float = 1.0
    sublayer_overhead_s: float = 0.0

    def offered_bits(self, bits: Sequence[tuple[Bits, Bits]]) -> Sequence[tuple[Bits, Bits]]:
        """Those bits of weights and cache that the engine has. Raises HarnessError if it has none of them."""
        offered = [(weights, cache) for weights, cache in bits if weights in self.weight_bits and cache in self.kv_bits]
        if not offered:
            raise HarnessError(f"engine {self.name} has no {_in_words(bits)} (it has weights of "
                               f"{_listed(self.weight_bits)} and a cache of {_listed(self.kv_bits)} bits)")  # fmt: skip
        return offered

    def placed_fractions(self, sublayer: Sublayer, fractions: Fractions) -> Fractions:
        """Where the engine puts a sublayer's weights for requested fractions."""
        return by_whole_tensors(sublayer, fractions) if self.whole_tensors else fractions

    def placed_weights(self, shape: ModelShape, policy: OffloadPolicy) -> Fractions:
        """The fractions of all weights that the engine realises for a policy."""
        assert policy.weights is not None
        sizes = [(part, weight_bytes(part, policy) * part.count) for part in sublayers(shape)]
        placed = [[size * f for f in self.placed_fractions(part, policy.weights)] for part, size in sizes]
        device, host, disk = (sum(tier) / sum(size for _, size in sizes) for tier in zip(*placed, strict=True))
        return device, host, disk


@cache
def engine_cost_models() -> Mapping[str, EngineCostModel]:
    """The shipped cost models by engine."""
    return {name: _model(name, **entry) for name, entry in yaml.safe_load(FILE.read_text()).items()}


def engine_cost_model(engine: str) -> EngineCostModel:
    """An engine's cost model. Raises HarnessError if it has none."""
    models = engine_cost_models()
    if engine not in models:
        raise HarnessError(f"no plans are made for engine {engine!r}, which has no performance model "
                           f"(known: {', '.join(models)})")  # fmt: skip
    return models[engine]


def _in_words(bits: Sequence[tuple[Bits, Bits]]) -> str:
    return " and no ".join(f"{weights}-bit weights with a {cache}-bit cache" for weights, cache in bits)


def _listed(bits: Sequence[Bits]) -> str:
    return ", ".join(map(str, bits))


def _model(name: str, constants: Mapping[str, Mapping[str, Any]], **settings: Any) -> EngineCostModel:
    return EngineCostModel(name, **settings, **{key: constant["value"] for key, constant in constants.items()})
