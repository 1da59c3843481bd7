"""The host as the backend: its CPU computes, weights and KV blocks are in RAM and on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace

import torch

from engines.common.work_memory import SLACK_BYTES
from engines.offload.backend.base import Backend, Gemms, LoadRequest, Placement, free_disk
from engines.offload.device.host import HostDevice
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import HostKernels
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.kv_cache.record_file import RecordFile
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.kv_blocks import record_bytes, stage_blocks
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.storage import Storage, weight_formats
from engines.offload.model.kept_activations import DiskActivations
from engines.offload.model.meta_model import MetaModel
from engines.offload.timeline import Timeline
from engines.offload.weights import gemm
from engines.offload.weights.pass_rates import pass_rates
from engines.offload.weights.ring import HostRing, Ring
from engines.offload.weights.tile_reader import TileReader
from harness.api import Dtype, InfeasibleError, UnsupportedError


class HostBackend(Backend):
    """See Backend."""

    def __init__(self, load: LoadRequest, kernels: HostKernels, device: HostDevice) -> None:
        self._load = load
        self.kernels: HostKernels = kernels
        self.device = device
        self.timeline = Timeline()

    def choose_gemms(self, layers: Storage, outside: Storage) -> list[Gemms]:
        requested, hidden = self._load.policy.compute_dtype, self._load.model.shape.hidden
        reproducible = self._load.job.reproducible
        ways: list[gemm.GemmBackend] = []
        if requested == "int8":
            ways.append(gemm.int8_gemm(layers, hidden, self.kernels))
        else:
            dtypes: list[Dtype] = [requested] if requested != "auto" else sorted({self._load.model.dtype, "float32"})
            formats = weight_formats(self._load.policy, self._load.limits.host_memory is not None)
            for exact12 in formats:
                with suppress(UnsupportedError) if len(formats) > 1 else nullcontext():
                    ways.append(gemm.choose_gemm(layers, hidden, dtypes, self.kernels, exact12, reproducible))
        return [self._with_outside({layers: way}, outside, way.dtype) for way in ways]

    def _with_outside(self, gemms: Gemms, outside: Storage, dtype: Dtype) -> Gemms:
        """`gemms` with one for weights that are stored as `outside`, computed in `dtype`."""
        if outside in gemms:
            return gemms
        hidden, reproducible = self._load.model.shape.hidden, self._load.job.reproducible
        return gemms | {outside: gemm.choose_gemm(outside, hidden, [dtype], self.kernels, reproducible=reproducible)}

    def require(self, model: MetaModel) -> None:
        """The host runs every model that MetaModel takes."""

    def bound_values(self, model: MetaModel) -> int:
        return model.dtypes.values(model.small)

    def plan(self, request: MemoryRequest, way: gemm.GemmBackend, unwritten: Callable[[], int]) -> MemoryPlan:
        policy, limits = self._load.policy, self._load.limits
        self._request = request
        refusal = None
        try:
            self._plan = plan_host_memory(request, policy, limits.host_memory)
        except InfeasibleError as exc:
            if (limits.host_memory or 0) <= SLACK_BYTES:  # rates change nothing, and measuring them takes as much
                raise
            refusal = exc
        if refusal is not None or self._may_be_faster:
            hidden, scratch = self._load.model.shape.hidden, self._load.job.scratch
            if rates := pass_rates(way, hidden, self.kernels, scratch, limits.disk_bandwidth):
                rates = replace(rates, wait_s=self._load.links_wait_s)
                # a stage's cache stays in memory, as its layers were counted
                disk = free_disk(self._load.job, unwritten) if self._load.stage is None else 0
                self._plan = plan_host_memory(request, policy, limits.host_memory, rates, disk)
                refusal = None
        if refusal is not None:
            raise refusal
        return self._plan

    @property
    def _may_be_faster(self) -> bool:
        """Whether rates may tell a better plan: something is read from disk, or fewer sequences run than could."""
        plan, policy = self._plan, self._load.policy
        fewer = plan.sequences < policy.block_size and policy.cache is None
        return len(plan.resident) < len(self._request.tiles) or fewer

    def weights(self, reader: TileReader, streamed: Sequence[WeightTile]) -> tuple[dict[int, torch.Tensor], Ring]:
        tiles, plan = self._request.tiles, self._plan
        resident = {i: reader.load(tiles[i]) for i in sorted(plan.resident)}
        return resident, HostRing(streamed, plan.slots, reader)

    def host_experts(self, stack: ExitStack) -> None:
        """None: the host is where all experts are multiplied."""

    def kv_cache(self, throttle: Throttle, stack: ExitStack) -> PagedCache:
        plan, shape, stored = self._plan, self._request.shape, self._request.cache
        blocks = None
        if plan.disk_kv_blocks:
            policy, layers, count = self._load.policy, shape.num_layers, plan.disk_kv_blocks
            record, slots = record_bytes(shape, stored), stage_blocks(policy, count, self._request.max_sequence)
            file = RecordFile(self._load.job.scratch, layers, count, record, self.timeline, throttle)
            stack.callback(file.close)
            blocks = DiskBlocks(file, layers, count, record, slots, policy.overlap)
        quantizer, writer = self.kernels.quantizer(stored), self.kernels.row_writer()
        return PagedCache(shape, plan.kv_blocks, stored, quantizer, blocks, writer=writer)

    @property
    def moves_activations(self) -> bool:
        return bool(self._load.policy.activations and self._load.policy.activations[2])

    def activations(self, batches: int, rows: int, row_bytes: int, throttle: Throttle) -> DiskActivations:
        share, folder = self.placement().activations[2], self._load.job.scratch
        return DiskActivations(share, batches, rows, row_bytes, folder, self.timeline, throttle)

    def placement(self) -> Placement:
        """Without a device all that is in memory is on the host, whatever a policy gives the device."""
        plan, tiles = self._plan, self._request.tiles
        moved = self._load.policy.activations[2] if self._load.policy.activations else 0.0
        in_ram = sum(tiles[i].nbytes for i in plan.resident)
        on_disk = plan.disk_kv_blocks / (plan.kv_blocks + plan.disk_kv_blocks)
        return Placement(
            weights=(0, in_ram, sum(tile.nbytes for tile in tiles) - in_ram),
            cache=(0.0, 1 - on_disk, on_disk),
            activations=(0.0, 1 - moved, moved),
        )

    def notes(self) -> list[str]:
        return [self._plan.note, self.kernels.note]
