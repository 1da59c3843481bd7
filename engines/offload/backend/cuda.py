"""A CUDA device as the backend: it computes, and takes what it cannot hold from pinned memory and disk."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from engines.common.work_memory import CONTEXT_BYTES
from engines.offload.backend.base import Backend, Gemms, LoadRequest, Placement, free_disk
from engines.offload.device.pinned import PinnedMemory
from engines.offload.device.protocol import Accelerator
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import (
    AttentionMetadata,
    AttentionSpec,
    DeviceKernels,
    HostKernels,
    NoCompilerError,
    Quantizer,
)
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.lower_blocks import DiskPart, LowerBlocks
from engines.offload.kv_cache.paged_cache import PagedCache, block_layout
from engines.offload.kv_cache.record_file import RecordFile
from engines.offload.memory.device import PINNED_SHARE, pinned_sizes, plan_device_memory, tile_values
from engines.offload.memory.kv_blocks import STAGES, kv_block_bytes, pieces, record_bytes
from engines.offload.memory.layout import READERS, WeightTile
from engines.offload.memory.pass_time import LinkRates, PassRates
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.storage import Panels, Storage, WeightStorage
from engines.offload.model.kept_activations import LowerActivations
from engines.offload.model.meta_model import MetaModel
from engines.offload.timeline import Timeline
from engines.offload.weights import gemm
from engines.offload.weights.host_experts import HostExperts
from engines.offload.weights.pass_rates import disk_rates
from engines.offload.weights.ring import DeviceRing, Ring
from engines.offload.weights.tile_reader import TileReader
from harness.api import UnsupportedError
from harness.common.host_memory import free_memory

#: Bytes/s over a link of PCIe 3 x16, and of keys and values that the host attends to; and of the device's memory. They
#: only weigh placements against each other, and are not measured before memory is taken.
_LINK = LinkRates(up=12e9, down=12e9, attended=10e9)
_MEMORY = 200e9


class CudaBackend(Backend):
    """See Backend. `host_kernels` attend to KV blocks in host memory. Raises UnsupportedError for policies that cannot
    be run with a device."""

    def __init__(
        self, load: LoadRequest, host_kernels: HostKernels, device: Accelerator, kernels: DeviceKernels | None = None
    ) -> None:
        if load.policy.cpu_attention and load.policy.value_sparsity < 1:
            raise UnsupportedError("policy.cpu_attention: the host attends to all values: leave out value_sparsity")
        self._load = load
        self._host_kernels = host_kernels
        self.device: Accelerator = device
        self.timeline = Timeline(device)
        self.kernels: DeviceKernels = kernels or DeviceKernels()
        self.tile_values = tile_values(load.model.shape)
        self._host_attention: HostAttention | None = None
        self._host_experts: HostExperts | None = None

    def choose_gemms(self, layers: Storage, outside: Storage) -> list[Gemms]:
        """In twelve bits only where the policy says so: no device has measured yet what that costs."""
        policy, model = self._load.policy, self._load.model
        dtype = policy.float_dtype("offload on a device", model.dtype)
        self._dtype = getattr(torch, dtype)
        kept: dict[WeightStorage, WeightStorage] = {stored: stored for stored in (layers, outside)}
        if policy.weight_format == "exact12":
            if (model.dtype, dtype) != ("bfloat16", "bfloat16"):
                raise UnsupportedError("policy.weight_format: exact12 is for weights in bfloat16, computed in bfloat16")
            kept = {layers: Panels(exact12=True), Panels(): Panels()}  # a tile may be too varied for twelve bits
        return [
            {
                stored: gemm.device_gemm(how, model.shape.hidden, dtype, self._quantizer(how), self.device)
                for stored, how in kept.items()
            }
        ]

    def _quantizer(self, stored: WeightStorage) -> Quantizer:
        if isinstance(stored, Panels):
            try:
                return self.kernels.panels(stored, self._host_kernels.weight_packer(stored))
            except NoCompilerError as exc:
                raise UnsupportedError(f"policy.weight_format: exact12 needs the compiled kernels: {exc}") from exc
        return self.kernels.quantizer(stored)

    def require(self, model: MetaModel) -> None:
        if self._load.policy.cpu_attention and model.has_windows:
            raise UnsupportedError(
                "policy.cpu_attention: layers with a sliding window attend on the device: leave it out"
            )

    def bound_values(self, model: MetaModel) -> int:
        tables = sum(rows * width for name, (rows, width) in model.tables.items() if name != model.token_table)
        return tables + model.dtypes.values(model.small)

    def plan(self, request: MemoryRequest, way: gemm.GemmBackend, unwritten: Callable[[], int]) -> MemoryPlan:
        limits = self._load.limits
        assert limits.device_memory is not None
        host = int(PINNED_SHARE * free_memory()) if limits.host_memory is None else limits.host_memory
        self._request = request
        device = limits.device_memory - (self.device.context_bytes - CONTEXT_BYTES)
        rates = self._rates(way) if self._load.policy.cache is None else None
        disk = math.inf if rates is None else free_disk(self._load.job, unwritten)
        self._plan = plan_device_memory(request, self._load.policy, device, host, rates, disk)
        return self._plan

    def _rates(self, way: gemm.GemmBackend) -> PassRates | None:
        """What placement counts on: the disk and products as measured, the rest as assumed; None without the disk."""
        disk = disk_rates(self._host_kernels, self._load.job.scratch, self._load.limits.disk_bandwidth)
        if disk is None:
            return None
        return PassRates(disk.read, disk.read_bytes, lambda rows: 2 * rows / way.flops, _MEMORY, disk.write, _LINK)

    def weights(self, reader: TileReader, streamed: Sequence[WeightTile]) -> tuple[dict[int, torch.Tensor], Ring]:
        plan, tiles = self._plan, self._request.tiles
        sizes = pinned_sizes(self._request, plan.pinned, plan.host_kv_blocks, plan.pinned_stage_blocks)
        self._pinned = PinnedMemory(sizes, self.device.pinned)
        staging = [self._pinned.take(max(tile.span for tile in tiles)) for _ in range(READERS)]
        room = torch.empty(sum(tiles[i].span for i in plan.resident), dtype=torch.uint8, device=self.device.where)
        resident, start = {}, 0
        for i in sorted(plan.resident):
            resident[i] = room[start : start + tiles[i].nbytes]
            start += tiles[i].span
            self.device.copy([(resident[i], reader.load(tiles[i], staging[0]))]).synchronize()
        pinned = {i: reader.load(tiles[i], self._pinned.take(tiles[i].span)) for i in sorted(plan.pinned)}
        self._held_on_host = pinned
        return resident, DeviceRing(streamed, plan.slots, pinned, reader, self.device, staging)

    def host_experts(self, stack: ExitStack) -> HostExperts | None:
        if not self._load.policy.cpu_experts:
            return None
        tiles, usage, shape = self._request.tiles, self._request.usage, self._request.shape
        dtype = self._load.policy.float_dtype("offload on a device", self._load.model.dtype)
        stored = dict.fromkeys(tile.stored for tile in tiles if tile.matrix in usage.experts)
        ways = {how: gemm.in_place_gemm(how, shape.hidden, dtype, self._host_kernels) for how in stored}
        self._host_experts = HostExperts(
            tiles, self._plan.resident, self._held_on_host, usage, ways, self.device, self.timeline
        )
        stack.callback(self._host_experts.close)
        return self._host_experts

    def kv_cache(self, throttle: Throttle, stack: ExitStack) -> PagedCache:
        plan, shape, stored = self._plan, self._request.shape, self._request.cache
        blocks, lower = None, plan.host_kv_blocks + plan.disk_kv_blocks
        if lower:
            sizes = pieces(plan.host_kv_blocks, kv_block_bytes(shape, stored) // shape.num_layers)
            layers = [[self._pinned.take(size)[:size] for size in sizes] for _ in range(shape.num_layers)]
            layout, overlap = block_layout(shape, stored), self._load.policy.overlap
            on_disk = self._disk_part(throttle, stack) if plan.disk_kv_blocks else None
            blocks = LowerBlocks(layers, lower, plan.stage_blocks, *layout, self.device, overlap, on_disk)
            if self._load.policy.cpu_attention:
                kernel = self._host_kernels.attention(stored, sparse=False)
                quantizer = self._host_kernels.quantizer(stored)
                self._host_attention = HostAttention(
                    blocks, kernel, quantizer, self._host_kernels.row_writer(), self.kernels.row_merger(), self.device,
                    self.timeline, self._attended_blocks(on_disk),
                )  # fmt: skip
                stack.callback(self._host_attention.close)
        self._compile_kernels(blocks is not None)
        quantizer = self.kernels.quantizer(stored)
        return PagedCache(shape, plan.kv_blocks, stored, quantizer, blocks, self.device.where, self._host_attention,
                          num_disk_blocks=plan.disk_kv_blocks)  # fmt: skip

    def _attended_blocks(self, on_disk: DiskPart | None) -> DiskBlocks | None:
        """The blocks on disk where the host attends to them: in stages of their own, of the same file."""
        if on_disk is None:
            return None
        plan, layers, overlap = self._plan, self._request.shape.num_layers, self._load.policy.overlap
        slots = plan.pinned_stage_blocks
        return DiskBlocks(on_disk.file, layers, plan.disk_kv_blocks, on_disk.record, slots, overlap)

    def _disk_part(self, throttle: Throttle, stack: ExitStack) -> DiskPart:
        plan, shape = self._plan, self._request.shape
        record = record_bytes(shape, self._request.cache)
        file = RecordFile(
            self._load.job.scratch, shape.num_layers, plan.disk_kv_blocks, record, self.timeline, throttle
        )
        stack.callback(file.close)
        size = plan.pinned_stage_blocks * record
        return DiskPart(file, record, [self._pinned.take(size)[:size] for _ in range(STAGES)])

    @property
    def moves_activations(self) -> bool:
        return bool(self._load.policy.activations and self._load.policy.activations[0] < 1)

    def activations(self, batches: int, rows: int, row_bytes: int, throttle: Throttle) -> LowerActivations:
        _, host, disk = self.placement().activations
        folder, timeline = self._load.job.scratch, self.timeline
        return LowerActivations(host, disk, self.device, batches, rows, row_bytes, folder, timeline, throttle)

    @torch.inference_mode()
    def _compile_kernels(self, staged: bool) -> None:
        """Attends once to an empty block, as prompts and as single tokens do: a kernel is compiled at its first call,
        which must not be in a measured pass."""
        shape, stored, where = self._request.shape, self._request.cache, self.device.where
        kernel = self.kernels.attention(stored, self._load.policy.value_sparsity < 1)
        layout, stored_dtype = block_layout(shape, stored)
        rows = torch.zeros(1, *layout, dtype=stored_dtype, device=where)
        blocks = LayerBlocks(rows, rows if staged else None)
        block_table = torch.zeros(1, 1, dtype=torch.int32)
        for count in (2, 1):
            query = torch.zeros(count, shape.num_heads, shape.head_dim, dtype=self._dtype, device=where)
            metadata = AttentionMetadata.of([count], [0], block_table, self.device.upload)
            lse = query.new_zeros(count, shape.num_heads, dtype=torch.float32)
            for given in (None, lse):
                kernel(query.transpose(0, 1), blocks, metadata, AttentionSpec(1.0), given)
            if self._host_attention is not None:
                row = self.device.upload(torch.zeros(1, dtype=torch.long))
                self.kernels.row_merger()(query, lse, row, query[:1].clone(), lse[:1].clone())
        self.kernels.quantizer(stored).pack(torch.zeros(shape.num_kv_heads, shape.head_dim, device=where))
        self.device.mark().synchronize()

    def placement(self) -> Placement:
        plan, tiles = self._plan, self._request.tiles
        device, host = (sum(tiles[i].nbytes for i in chosen) for chosen in (plan.resident, plan.pinned))
        blocks = plan.kv_blocks + plan.host_kv_blocks + plan.disk_kv_blocks
        on_host, on_disk = plan.host_kv_blocks / blocks, plan.disk_kv_blocks / blocks
        return Placement(
            weights=(device, host, sum(tile.nbytes for tile in tiles) - device - host),
            cache=(1 - on_host - on_disk, on_host, on_disk),
            activations=self._load.policy.activations or (1.0, 0.0, 0.0),
        )

    def notes(self) -> list[str]:
        policy, notes = self._load.policy, [self._plan.note, self.kernels.note]
        if policy.overlaps_nano_batches:
            notes.append(self.device.partition)
        if policy.cpu_experts:
            notes.append(self._experts_note())
        if self._host_attention is not None:
            notes.append(self._host_kernels.note)
        elif policy.cpu_attention:
            notes.append("cpu_attention has nothing to do: all keys and values are on the device")
        return notes

    def _experts_note(self) -> str:
        """What the host multiplies of a mixture, and how fast."""
        experts = self._host_experts
        if experts is None or not experts.count:
            return "cpu_experts has nothing to do: no expert is as a whole in host memory"
        by_rows = ", ".join(f"{1e-9 / seconds:.3g} at {rows}" for rows, seconds in experts.rates.host)
        return (f"{experts.count} experts in host memory: copied at {experts.rates.link / 1e9:.3g} GB/s or multiplied "
                f"there, in GB/s by rows {by_rows}")  # fmt: skip
