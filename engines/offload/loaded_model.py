"""A model that is ready to run, with everything that its passes use, and what it holds and has moved in numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, Hadamard
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.expert_usage import ExpertUsage, MixtureCounts
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import WeightStorage
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import MetaModel
from engines.offload.pass_ops import AttentionOverlap
from engines.offload.timeline import Timeline
from engines.offload.weights.gemm import GemmBackend
from engines.offload.weights.host_experts import HostExperts
from engines.offload.weights.kept_usage import KeptUsage
from engines.offload.weights.stream import WeightStream
from harness.api import EngineTrace, LoadReport, LocalModel, OffloadPolicy, OnlineStats


@dataclass
class RunCounts:
    """What passes since the load added up to; see EngineStats."""

    passes: int = 0
    rows: int = 0
    pass_s: float = 0.0
    task_s: dict[str, float] = field(default_factory=dict)
    between_passes_s: float = 0.0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    formed_ahead: int = 0

    def add_tasks(self, seconds: Mapping[str, float]) -> None:
        """Adds what a pass took by task, named as in a timeline."""
        for task, taken in seconds.items():
            name = task.removeprefix("task_")
            self.task_s[name] = self.task_s.get(name, 0.0) + taken


@dataclass(frozen=True, kw_only=True)
class EngineStats(OnlineStats):
    """Counts and bytes since the load.

    `formed_ahead`: passes that were formed while the one before computed. `num_kv_blocks` are all blocks of the cache.
    `pass_weight_bytes`: what one pass streams. `kv_bytes_read` and `kv_bytes_written`: of offloaded KV blocks.
    `activation_rows`, and of them `activation_rows_on_disk`: rows that passed between layers. `experts`: how often each
    was used, by mixture.
    """

    formed_ahead: int
    tile_bytes: tuple[int, ...]
    ring_slots: int
    pass_weight_bytes: int
    weight_bytes_read: int
    num_kv_blocks: int
    kv_bytes_read: int
    kv_bytes_written: int
    activation_rows: int
    activation_rows_on_disk: int
    experts: Mapping[str, MixtureCounts]


@dataclass(frozen=True)
class LoadedModel:
    """What loader.load makes, the runner and the executor use, and the engine closes.

    Weights: `resident` tiles (stored bytes by index) stay where they are multiplied, the others come from `stream`;
    `gemms` multiply them, by how they are stored. `overlaps`: attentions that run beside other batches' products, by
    `attention_beside`, in the order of `policy.nano_order` if it has one.
    `host_experts`: multiplies experts on the host beside a device. `expert_usage`: how often a pass needs an expert, as
    far as it was known; `expert_counts` counts on.
    `hadamard`: None where keys and values are not quantized. `io_compute_balance_rows`: rows at which a pass computes
    as long as its weights take to stream. `check_tables`: raises HarnessError where a mapped table was cut meanwhile.
    """

    model: LocalModel
    policy: OffloadPolicy
    plan: MemoryPlan
    meta_model: MetaModel
    device: Device
    tiles: Sequence[WeightTile]
    resident: Mapping[int, torch.Tensor]
    check_tables: Callable[[], None]
    stream: WeightStream
    host_experts: HostExperts | None
    expert_usage: ExpertUsage
    expert_counts: KeptUsage
    gemms: Mapping[WeightStorage, GemmBackend]
    overlaps: Sequence[AttentionOverlap]
    cache: PagedCache
    attention: AttentionKernel
    attention_beside: AttentionKernel
    hadamard: Hadamard | None
    activation_offload: ActivationOffload | None
    io_compute_balance_rows: int
    timeline: Timeline
    report: LoadReport
    counts: RunCounts = field(default_factory=RunCounts)

    @property
    def can_replay(self) -> bool:
        """Whether passes of one batch may be captured and replayed: the host computes, a pool multiplies, and the
        model's code neither depends on values, as a mixture's choice of experts does, nor talks to other ranks."""
        pooled = all(way.pool is not None for way in self.gemms.values())
        alone = self.policy.ranks == 1 and self.activation_offload is None
        return pooled and alone and self.device.where.type == "cpu" and not self.meta_model.experts

    def settle(self) -> None:
        """Brings timeline and counts up to the last pass."""
        for sums in self.timeline.settle():
            self.counts.add_tasks(sums.tasks)
            self.counts.between_passes_s += sums.idle_s

    def trace(self) -> EngineTrace:
        """What the timeline tells of the passes of the last run."""
        self.settle()
        return self.timeline.trace()

    def stats(
        self, waiting: int = 0, running: int = 0, kv_blocks: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> EngineStats:
        """What is held and was moved so far; so many requests wait and run, and sequences hold so many `kv_blocks` by
        tier, of so many: by default those of the cache."""
        self.settle()
        activations = self.activation_offload
        moving = [blocks for blocks in (self.cache.offloaded, self.cache.host_attention) if blocks is not None]
        used, total = map(self._by_tier, kv_blocks or (self.cache.num_used, self.cache.sizes))
        return EngineStats(
            waiting=waiting,
            running=running,
            kv_blocks_used=used,
            kv_blocks_total=total,
            kv_store=None if self.cache.store is None else self.cache.store.stats(),
            **asdict(self.counts),
            tile_bytes=self._tile_bytes,
            ring_slots=self.stream.slots,
            pass_weight_bytes=self._pass_weight_bytes,
            weight_bytes_read=self.stream.bytes_read,
            num_kv_blocks=self.cache.num_blocks,
            kv_bytes_read=sum(blocks.bytes_read for blocks in moving),
            kv_bytes_written=sum(blocks.bytes_written for blocks in moving),
            activation_rows=0 if activations is None else activations.rows,
            activation_rows_on_disk=0 if activations is None else activations.rows_on_disk,
            experts=dict(self.expert_counts.counts),
        )

    @cached_property
    def _tile_bytes(self) -> tuple[int, ...]:
        return tuple(tile.nbytes for tile in self.tiles)

    @cached_property
    def _pass_weight_bytes(self) -> int:
        return sum(tile.span for tile in self.stream.tiles)

    def _by_tier(self, blocks: Sequence[int]) -> dict[str, int]:
        """Counts of KV blocks by the name of their tier, without tiers that have none."""
        names = ("host", "disk") if self.device.where.type == "cpu" else ("device", "host", "disk")
        there = (True, *(size > 0 for size in self.cache.sizes[1:]))
        return {name: count for name, count, is_there in zip(names, blocks, there, strict=False) if is_there}
