"""The host as the backend: its CPU computes, weights and KV blocks are in RAM and on disk."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from engines.offload.backend.base import Backend, LoadRequest, Placement
from engines.offload.device.host import HostDevice
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import HostKernels
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.kv_blocks import record_bytes
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.storage import Storage, WeightStorage, may_use_twelve_bits
from engines.offload.model.meta_model import MetaModel
from engines.offload.timeline import Timeline
from engines.offload.weights import gemm
from engines.offload.weights.ring import HostRing, Ring
from engines.offload.weights.tile_reader import TileReader
from harness.api import Dtype


class HostBackend(Backend):
    """See Backend."""

    def __init__(self, load: LoadRequest, kernels: HostKernels, device: HostDevice) -> None:
        self._load = load
        self.kernels: HostKernels = kernels
        self.device = device
        self.timeline = Timeline()

    def choose_gemms(self, layers: Storage, outside: Storage) -> dict[WeightStorage, gemm.GemmBackend]:
        requested, hidden = self._load.policy.compute_dtype, self._load.model.shape.hidden
        if requested == "int8":
            gemms: dict[WeightStorage, gemm.GemmBackend] = {layers: gemm.int8_gemm(layers, hidden, self.kernels)}
        else:
            dtypes: list[Dtype] = [requested] if requested != "auto" else sorted({self._load.model.dtype, "float32"})
            gemms = {layers: gemm.choose_gemm(layers, hidden, dtypes, self.kernels, self._exact12())}
        if outside != layers:
            gemms[outside] = gemm.choose_gemm(outside, hidden, [gemms[layers].dtype], self.kernels)
        torch.set_num_threads(min(gemm.torch_threads(way.pool) for way in gemms.values()))
        return gemms

    def _exact12(self) -> Literal["no", "may", "must"]:
        policy = self._load.policy
        if policy.weight_format == "exact12":
            return "must"
        return "may" if may_use_twelve_bits(policy, self._load.limits.host_memory is not None) else "no"

    def require(self, model: MetaModel) -> None:
        """The host runs every model that MetaModel takes."""

    def bound_values(self, model: MetaModel) -> int:
        return sum(torch.Size(shape).numel() for shape in model.small.values())

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        self._request = request
        self._plan = plan_host_memory(request, self._load.policy, self._load.limits.host_memory)
        return self._plan

    def weights(self, reader: TileReader, streamed: Sequence[WeightTile]) -> tuple[dict[int, torch.Tensor], Ring]:
        tiles, plan = self._request.tiles, self._plan
        resident = {i: reader.load(tiles[i]) for i in sorted(plan.resident)}
        return resident, HostRing(streamed, plan.slots, reader)

    def kv_cache(self, throttle: Throttle, stack: ExitStack) -> PagedCache:
        plan, shape, stored = self._plan, self._request.shape, self._request.cache
        blocks = None
        if plan.disk_kv_blocks:
            scratch, overlap = self._load.job.scratch, self._load.policy.overlap
            record = record_bytes(shape, stored)
            blocks = DiskBlocks(
                scratch, shape.num_layers, plan.disk_kv_blocks, record, self.timeline, throttle, overlap
            )
            stack.callback(blocks.close)
        quantizer, writer = self.kernels.quantizer(stored), self.kernels.row_writer()
        return PagedCache(shape, plan.kv_blocks, stored, quantizer, blocks, writer=writer)

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
