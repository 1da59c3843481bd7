"""How engines work: what they overlap, copy and unpack when. Constants of software, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from engines.planning.workload import Fractions, Sublayer, by_whole_matrices, sublayers, weight_bytes
from harness.api import ModelShape, OffloadPolicy, Schedule

#: How transfers meet arithmetic. `turns`: not at all. `slot`: a transfer runs beside one batch's half layer, and all
#: wait for each other after it (FlexGen). `layer`: a layer's beside that layer's arithmetic. `pass`: whatever is next,
#: as far ahead as a ring reaches: the slowest resource sets the pace.
Overlap = Literal["turns", "slot", "layer", "pass"]


@dataclass(frozen=True)
class EngineCostModel:
    """An engine's way of working.

    `pinned_weights`, `pinned_cache`: whether they are copied from pinned memory. `direct`: whether the disk is read
    past the page cache; `uncached_share`: of the disk's rate that an engine reaches that counts on the page cache where
    there is none. `unpack_each_batch`: weights of fewer bits are unpacked for each batch, not once a pass.
    `packed_attention`: the host's attention takes a cache of fewer bits. `parallel_attention`: it runs while the device
    multiplies for another batch.

    `whole_matrices`: whether a matrix is in one place, whatever fractions are asked for.

    `link_share`: of the link's bandwidth that its copies reach. `packed_load`: bytes/s at which weights of fewer bits
    reach the device, if something slower than the link stands between. `unpack_bytes`, `cache_bytes`: bytes of memory
    traffic to unpack a value of weights and of the cache; None where a kernel does it. `attention_bytes`: bytes of
    memory traffic of the device's attention for each byte of the cache in 16 bits. `slot_s`: seconds around each
    batch's half layer.
    """

    overlap: Overlap
    schedules: tuple[Schedule, ...] = ("row",)
    pinned_weights: bool = True
    pinned_cache: bool = True
    direct: bool = True
    uncached_share: float = 1.0
    unpack_each_batch: bool = False
    packed_attention: bool = True
    parallel_attention: bool = False
    whole_matrices: bool = False
    link_share: float = 1.0
    packed_load: float | None = None
    unpack_bytes: float | None = None
    cache_bytes: float | None = None
    attention_bytes: float = 1.0
    slot_s: float = 0.0


# load_weight, load_cache, store_cache and compute of one batch's half layer, then a synchronisation; copies of what is
# not pinned through a buffer; packed weights unpacked by every batch (flexgen/flex_opt.py)
_FLEXGEN = EngineCostModel(
    "slot", ("row", "zigzag"), pinned_cache=False, direct=False, unpack_each_batch=True, packed_attention=False,
    packed_load=1.71e9,
    whole_matrices=True, uncached_share=0.6, unpack_bytes=1.16, cache_bytes=37.3, attention_bytes=3.0, slot_s=9.0e-5,
)  # fmt: skip

#: Constants are fitted on the cells that docs/model.md names; the rest is how each engine's code works.
ENGINE_COST_MODELS: Mapping[str, EngineCostModel] = {
    "offload": EngineCostModel("pass", ("row", "zigzag", "sweep"), parallel_attention=True, slot_s=2e-5),
    "flexgen_ref": _FLEXGEN,
    # FlexGen with quantization of its own, and with threads that its model allots; what is unpacked waits for its copy
    "lm_offload": replace(_FLEXGEN, overlap="turns", unpack_bytes=28.2, cache_bytes=33.1, packed_load=None),
    # hooks copy a layer's weights when the layer is called
    "accelerate": EngineCostModel("turns", pinned_weights=False, direct=False, attention_bytes=4.0, slot_s=9.0e-5),
    "deepspeed_zero": EngineCostModel("layer", link_share=0.772, attention_bytes=4.0, slot_s=9.0e-5, unpack_bytes=4.0),
}


def realised(part: Sublayer, fractions: Fractions, style: EngineCostModel) -> Fractions:
    """Where an engine puts a part's weights that is asked for these fractions."""
    return by_whole_matrices(part, fractions) if style.whole_matrices else fractions


def realised_weights(shape: ModelShape, policy: OffloadPolicy, style: EngineCostModel) -> Fractions:
    """Where an engine puts all weights together."""
    assert policy.weights is not None
    sizes = [(part, weight_bytes(part, policy) * part.count) for part in sublayers(shape)]
    placed = [[size * f for f in realised(part, policy.weights, style)] for part, size in sizes]
    device, host, disk = (sum(tier) / sum(size for _, size in sizes) for tier in zip(*placed, strict=True))
    return device, host, disk
