"""A model that is ready to run, with everything that its passes use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, Hadamard
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Storage
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import MetaModel
from engines.offload.pass_ops import AttentionOverlap
from engines.offload.timeline import Timeline
from engines.offload.weights.gemm import GemmBackend
from engines.offload.weights.stream import WeightStream
from harness.api import LoadReport, LocalModel, OffloadPolicy


@dataclass(frozen=True)
class LoadedModel:
    """What loader.load makes, the runner and the executor use, and the engine closes.

    Weights: `resident` tiles (stored bytes by index) stay where they are multiplied, the others come from `stream`;
    `gemms` multiply them, by how they are stored. `overlaps`: attentions that run beside other batches' products.
    `hadamard`: None where keys and values are not quantized. `io_compute_balance_rows`: rows at which a pass computes
    as long as its weights take to stream.
    """

    model: LocalModel
    policy: OffloadPolicy
    plan: MemoryPlan
    meta_model: MetaModel
    device: Device
    tiles: Sequence[WeightTile]
    resident: Mapping[int, torch.Tensor]
    stream: WeightStream
    gemms: Mapping[Storage, GemmBackend]
    overlaps: Sequence[AttentionOverlap]
    cache: PagedCache
    attention: AttentionKernel
    hadamard: Hadamard | None
    host_attention: HostAttention | None
    activation_offload: ActivationOffload | None
    io_compute_balance_rows: int
    timeline: Timeline
    report: LoadReport

    @property
    def streamed(self) -> list[WeightTile]:
        """Tiles that come through the ring, in order of use."""
        return [tile for tile in self.tiles if tile.index not in self.plan.resident]
