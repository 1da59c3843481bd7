"""A model that is ready to run, with everything that its passes use, and what it holds and has moved in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, Hadamard
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import WeightStorage
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import MetaModel
from engines.offload.pass_ops import AttentionOverlap
from engines.offload.timeline import Timeline
from engines.offload.weights.gemm import GemmBackend
from engines.offload.weights.stream import WeightStream
from harness.api import LoadReport, LocalModel, OffloadPolicy


@dataclass(frozen=True)
class EngineStats:
    """Counts and bytes since the load, but for `passes`: those of the last run.

    `num_kv_blocks` are all blocks of the cache. `pass_weight_bytes`: what one pass streams. `kv_bytes_read` and
    `kv_bytes_written`: of offloaded KV blocks. `activation_rows`, and of them `activation_rows_on_disk`: rows that
    passed between layers.
    """

    passes: int
    tile_bytes: tuple[int, ...]
    ring_slots: int
    pass_weight_bytes: int
    weight_bytes_read: int
    num_kv_blocks: int
    kv_bytes_read: int
    kv_bytes_written: int
    activation_rows: int
    activation_rows_on_disk: int


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
    gemms: Mapping[WeightStorage, GemmBackend]
    overlaps: Sequence[AttentionOverlap]
    cache: PagedCache
    attention: AttentionKernel
    hadamard: Hadamard | None
    activation_offload: ActivationOffload | None
    io_compute_balance_rows: int
    timeline: Timeline
    report: LoadReport

    def stats(self) -> EngineStats:
        """What is held and was moved so far."""
        offloaded, activations = self.cache.offloaded, self.activation_offload
        return EngineStats(
            passes=self.timeline.passes,
            tile_bytes=tuple(tile.nbytes for tile in self.tiles),
            ring_slots=self.stream.slots,
            pass_weight_bytes=sum(tile.span for tile in self.stream.tiles),
            weight_bytes_read=self.stream.bytes_read,
            num_kv_blocks=self.cache.num_blocks,
            kv_bytes_read=0 if offloaded is None else offloaded.bytes_read,
            kv_bytes_written=0 if offloaded is None else offloaded.bytes_written,
            activation_rows=0 if activations is None else activations.rows,
            activation_rows_on_disk=0 if activations is None else activations.rows_on_disk,
        )
