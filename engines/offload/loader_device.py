"""As loading.py, for a model that is computed on a device: what it cannot hold comes from pinned memory and disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property

import torch

from engines.offload.device.pinned import PinnedMemory
from engines.offload.device.protocol import Device
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import AttentionKernel, AttentionMetadata, Hadamard, Quantizer
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kernels.cuda import DeviceKernels
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.host_blocks import HostBlocks
from engines.offload.kv_cache.paged_cache import PagedCache, block_layout
from engines.offload.loader import Loading
from engines.offload.memory.device import PINNED_SHARE, pinned_sizes, place_on_device, tile_values
from engines.offload.memory.kv_blocks import kv_block_bytes, pieces
from engines.offload.memory.layout import READERS, aligned
from engines.offload.memory.plan import Plan
from engines.offload.memory.storage import Storage
from engines.offload.timeline import Timeline
from engines.offload.weights import gemm
from engines.offload.weights.ring import DeviceRing, Ring
from engines.offload.weights.tile_reader import TileReader
from harness.api import Dtype, HardwareLimits, Job, LoadReport, LocalModel, OffloadPolicy, UnsupportedError
from harness.common.host_memory import free_memory


class DeviceLoading(Loading):
    """One model being loaded onto `device`; see Loading."""

    device: Device

    def __init__(
        self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job, device: Device
    ) -> None:
        if policy.cpu_attention and policy.value_sparsity < 1:
            raise UnsupportedError("policy.cpu_attention: the host attends to all values: leave out value_sparsity")
        self.device = device
        self._on_device = DeviceKernels()
        self.tile_values = tile_values(model.shape)
        super().__init__(model, policy, limits, job)
        if policy.cpu_attention and self.meta_model.has_windows:
            raise UnsupportedError(
                "policy.cpu_attention: layers with a sliding window attend on the device: leave it out"
            )
        self._passing: list[torch.Tensor] = []

    def _arithmetics(self, layers: Storage, outside: Storage) -> Mapping[Storage, gemm.GemmBackend]:
        asked, hidden = self.policy.compute_dtype, self.model.shape.hidden
        dtype: Dtype = self.model.dtype if asked == "auto" else asked
        return {
            stored: gemm.device_gemm(stored, hidden, dtype, self._on_device.quantizer(stored), self.device)
            for stored in dict.fromkeys((layers, outside))
        }

    def _attention_kernel(self) -> AttentionKernel:
        return self._on_device.attention(self.cached, self.policy.value_sparsity < 1)

    def _attention_memory(self) -> tuple[int, int]:
        sparse = self.policy.value_sparsity < 1
        longest = self.job.max_sequence
        return self._on_device.attention_memory(self.cached, self.model.shape, longest, self._compute_bytes, sparse)

    def _kernel_note(self) -> str:
        apart = self.device.partition if self.policy.nano_batches > 1 and self.policy.nano_overlap else ""
        return "; ".join(filter(None, (self._on_device.note, apart)))

    def _codec(self) -> Quantizer:
        return self._on_device.quantizer(self.cached)

    def _hadamard(self) -> Hadamard:
        return self._on_device.hadamard()

    def _small_values(self) -> int:
        tables = sum(a * b for name, (a, b) in self.meta_model.tables.items() if name != self.meta_model.token_table)
        return super()._small_values() + tables

    def _placed(self) -> Plan:
        limits = self.limits
        host = limits.host_memory
        if host is None:
            host = int(PINNED_SHARE * free_memory())
        assert limits.device_memory is not None
        return place_on_device(self._demand, self.policy, limits.device_memory, host)

    def _resident(self, reader: TileReader) -> dict[int, torch.Tensor]:
        plan = self.plan
        room = torch.empty(sum(aligned(self.tiles[i].nbytes) for i in plan.resident), dtype=torch.uint8,
                           device=self.device.where)  # fmt: skip
        memory, start = self._pinned, 0
        self._passing = [memory.take(max(b.span for b in self.tiles)) for _ in range(READERS)]
        resident = {}
        for i in sorted(plan.resident):
            tile = self.tiles[i]
            resident[i] = room[start : start + tile.nbytes]
            start += tile.span
            self.device.copy([(resident[i], reader.load(tile, self._passing[0]))]).synchronize()
        return resident

    def _ring(self, reader: TileReader) -> Ring:
        pinned = {
            i: reader.load(self.tiles[i], self._pinned.take(self.tiles[i].span)) for i in sorted(self.plan.pinned)
        }
        return DeviceRing(self.streamed, self.plan.slots, pinned, reader, self.device, self._passing)

    def _cache(self, timeline: Timeline, throttle: Throttle, parts: ExitStack) -> PagedCache:
        plan, shape = self.plan, self.model.shape
        elsewhere = None
        if plan.host_kv_blocks:
            sizes = pieces(plan.host_kv_blocks, kv_block_bytes(shape, self.cached) // shape.num_layers)
            home = [[self._pinned.take(size)[:size] for size in sizes] for _ in range(shape.num_layers)]
            layout = block_layout(shape, self.cached)
            elsewhere = HostBlocks(home, plan.host_kv_blocks, *layout, self.device, self.policy.overlap)
            if self.policy.cpu_attention:
                kernel, codec = self.kernels.attention(self.cached), self.kernels.quantizer(self.cached)
                self.notes.append(self.kernels.note)
                self.home = HostAttention(elsewhere, kernel, codec, self.device, timeline)
                parts.callback(self.home.close)
        self._warm(elsewhere is not None)
        at_home = self.home is not None
        return PagedCache(shape, plan.kv_blocks, self.cached, self._codec(), elsewhere, self.device.where, at_home)

    @torch.inference_mode()
    def _warm(self, staged: bool) -> None:
        """Attends once to a block of nothing, as prompts and as single tokens do: kernels are compiled when they are
        first met, which no measured pass should be."""
        shape = self.model.shape
        block, dtype = block_layout(shape, self.cached)
        rows = torch.zeros(1, *block, dtype=dtype, device=self.device.where)
        blocks = LayerBlocks(rows, rows if staged else None)
        put, table = self.device.upload, torch.zeros(1, 1, dtype=torch.int32)
        for count in (2, 1):
            query = torch.zeros(
                count, shape.num_heads, shape.head_dim, dtype=self.meta_model.dtype, device=self.device.where
            )
            for lse in (None, query.new_zeros(count, shape.num_heads, dtype=torch.float32)):
                segments = AttentionMetadata.of([count], [0], table, put)
                self._attention(query.transpose(0, 1), blocks, segments, AttentionSpec(1.0), lse)
        self._codec().pack(
            torch.zeros(shape.num_kv_heads, shape.head_dim, dtype=torch.float32, device=self.device.where)
        )
        self.device.mark().synchronize()

    @cached_property
    def _pinned(self) -> PinnedMemory:
        """All that the plan pins; taken from the system when it is first asked for."""
        return PinnedMemory(pinned_sizes(self._demand, self.plan.pinned, self.plan.host_kv_blocks), self.device.pinned)

    def _weights_by_tier(self) -> tuple[int, int, int]:
        total, device, host = (
            sum(self.tiles[i].nbytes for i in chosen)
            for chosen in (range(len(self.tiles)), self.plan.resident, self.plan.pinned)
        )
        return device, host, total - device - host

    def report(self) -> LoadReport:
        found = super().report()
        if not self.policy.cpu_attention or self.home is not None or found.policy is None:
            return found
        note = "cpu_attention has nothing to do: all keys and values are on the device"
        return replace(found, policy=replace(found.policy, cpu_attention=False), notes=(*found.notes, note))

    def _cache_by_tier(self, in_host: float, on_disk: float) -> tuple[float, float, float]:
        return 1 - in_host - on_disk, in_host, on_disk

    def _activations(self) -> tuple[float, float, float]:
        return 1.0, 0.0, 0.0
