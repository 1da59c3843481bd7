"""What loading a model asks of a backend: arithmetic, kernels, placement, the weight ring, the KV cache."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engines.offload.device.protocol import Device
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import KernelSet
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.stage_times import stage_shape
from engines.offload.memory.storage import Storage, WeightStorage
from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.model.kept_activations import Activations
from engines.offload.model.meta_model import MetaModel
from engines.offload.model.stage import Stage
from engines.offload.timeline import Timeline
from engines.offload.weights.gemm import GemmBackend
from engines.offload.weights.host_experts import HostExperts
from engines.offload.weights.ring import Ring
from engines.offload.weights.tile_reader import TileReader
from harness.api import HardwareLimits, Job, LocalModel, ModelShape, OffloadPolicy
from harness.common.files import nearest_existing
from harness.common.kept_nano_batches import KeptNanoBatches

#: Ways to multiply by how the policy has weights stored.
Gemms = dict[WeightStorage, GemmBackend]


@dataclass(frozen=True)
class LoadRequest:
    """What to load: a checkpoint, or a stage of it, or a part of each of its matrices, under a policy, within limits,
    for a job."""

    model: LocalModel
    policy: OffloadPolicy
    limits: HardwareLimits
    job: Job
    stage: Stage | None = None
    shard: TensorShard | None = None

    @classmethod
    def of(cls, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> "LoadRequest":
        """The whole model, with the nano-batches for `auto` that were kept for hosts of this machine."""
        if policy.nano_batches == "auto":
            kept = 1 if limits.gpu else KeptNanoBatches(job.cache).get(model.shape, policy)
            policy = replace(policy, nano_batches=kept)
        return cls(model, policy, limits, job)

    @property
    def shape(self) -> ModelShape:
        """The sizes of what is loaded."""
        whole, stage = self.model.shape, self.stage
        if self.shard is not None:
            return self.shard.shape(whole)
        return whole if stage is None else stage_shape(whole, stage.last - stage.first, stage.is_last)

    @property
    def links_wait_s(self) -> float:
        """Seconds that the links' delay adds to a pass: of its announcement, and of the hidden states that leave each
        stage but the last; or of a layer's two sums, for each of which ranks exchange their parts twice."""
        if self.policy.ranks == 1:
            return 0.0
        messages = 1 + 4 * self.shape.num_layers if self.policy.tensor > 1 else self.policy.pipeline
        return messages * (self.limits.link_delay_s or 0.0)

    @property
    def mean_new(self) -> int:
        """Tokens that a sequence generates, on average; at least 1."""
        job = self.job
        return max(1, 2 * (job.max_sequence - job.mean_sequence) if job.mean_new is None else job.mean_new)


def free_disk(job: Job, unwritten: Callable[[], int]) -> int:
    """Bytes that are free for the job's scratch files once the weights are converted, which will take `unwritten` bytes
    more of the disk that the cache is on."""
    free = shutil.disk_usage(job.scratch).free
    if nearest_existing(job.cache).stat().st_dev != job.scratch.stat().st_dev:
        return free
    return max(0, free - unwritten())


@dataclass(frozen=True)
class Placement:
    """What is really where, on the device, in host memory and on disk: bytes of weights, fractions of the rest."""

    weights: tuple[int, int, int]
    cache: tuple[float, float, float]
    activations: tuple[float, float, float]


class Backend(Protocol):
    """Serves one load, its methods called in the order in which they stand here; see loader.load.

    `device` computes, by `kernels`; `timeline` is on its clock. `tile_values`: values of a weight tile, None for
    layout.py's own choice.
    """

    device: Device
    kernels: KernelSet
    timeline: Timeline
    tile_values: int | None = None

    @property
    def moves_activations(self) -> bool:
        """Whether the policy has activations elsewhere between layers."""

    def choose_gemms(self, layers: Storage, outside: Storage) -> Sequence[Gemms]:
        """The fastest way to multiply decoder layers' weights and the others; measured. The keys are how the policy has
        them stored; each way says how it wants them. There may be one for plain panels besides. Where weights may be
        kept in several formats, the fastest with each: the job's plan decides."""

    def require(self, model: MetaModel) -> None:
        """Raises UnsupportedError for a model that cannot run here under the policy."""

    def bound_values(self, model: MetaModel) -> int:
        """How many values of small parameters and tables are kept where the model computes."""

    def plan(self, request: MemoryRequest, way: GemmBackend, unwritten: Callable[[], int]) -> MemoryPlan:
        """What goes where if the layers' weights are multiplied in this `way`; the last plan counts. `unwritten`: bytes
        that the conversion of the weights will take of the disk. Raises InfeasibleError with the numbers where the
        limits are too small."""

    def weights(self, reader: TileReader, streamed: Sequence[WeightTile]) -> tuple[dict[int, torch.Tensor], Ring]:
        """The planned tiles that stay where they are multiplied (stored bytes by index), and the ring for the
        `streamed` ones, which `reader` will fill."""

    def host_experts(self, stack: ExitStack) -> HostExperts | None:
        """What multiplies experts on the host beside a device, of the weights that were loaded, until `stack` closes
        it; None for nothing."""

    def kv_cache(self, throttle: Throttle, stack: ExitStack) -> PagedCache:
        """Allocates the planned KV cache; `stack` closes what it opens."""

    def activations(self, batches: int, rows: int, row_bytes: int, throttle: Throttle) -> Activations:
        """Where the policy has activations between layers, for `batches` batches of `rows` rows."""

    def placement(self) -> Placement:
        """What is where, for the load's report."""

    def notes(self) -> list[str]:
        """What the load's report should say of kernels, the plan and options without effect."""
