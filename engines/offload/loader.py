"""From a model, a policy and limits to a runtime: what is chosen, planned, converted and started, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from engines.offload.device.protocol import Device
from engines.offload.disk.throttle import Throttle
from engines.offload.executor import Executor
from engines.offload.kernels import AttentionKernel, Hadamard, HostKernels, Quantizer
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.host import place
from engines.offload.memory.kv_blocks import record_bytes
from engines.offload.memory.layout import tiles_of
from engines.offload.memory.plan import MemoryRequest, Plan
from engines.offload.memory.storage import Storage, storages
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import MetaModel
from engines.offload.model_runner import Runtime
from engines.offload.scheduler import steady_blocks
from engines.offload.timeline import Timeline
from engines.offload.weights import gemm
from engines.offload.weights.checkpoint_reader import CheckpointReader
from engines.offload.weights.convert import ConvertedCheckpoint, convert
from engines.offload.weights.ring import HostRing, Ring
from engines.offload.weights.stream import WeightStream
from engines.offload.weights.tile_reader import TileReader
from harness.api import DTYPE_BYTES, Dtype, HardwareLimits, Job, LoadReport, LocalModel, OffloadPolicy


class Loading:
    """One model being loaded into host memory. What is chosen and planned is so once this exists; nothing has been read
    or written.

    Raises UnsupportedError for models and policies that the engine cannot run, InfeasibleError for too small a budget.
    """

    #: Where it computes, if not on the host; loading_device.py.
    device: Device | None = None
    #: What attends to blocks in host memory, where a device computes; once the cache is there.
    home: HostAttention | None = None
    #: Values of a weight tile, where that is not for layout.py to say.
    tile_values: int | None = None

    def __init__(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> None:
        self.model = model
        self.policy = policy
        self.limits = limits
        self.job = job
        self.kernels = HostKernels(job.cache, torch.get_num_threads())
        layers, outside, self.cached = storages(model.dtype, policy)
        self._ways = self._arithmetics(layers, outside)
        self._arithmetic = self._ways[layers]
        self.meta_model = MetaModel(Path(model.path), model.shape, getattr(torch, self._arithmetic.dtype))
        parks = policy.activations is not None and policy.activations[2] > 0
        self._layers = self.meta_model.layers() if parks else ()
        self._compute_bytes = DTYPE_BYTES[self._arithmetic.dtype]
        how = [layers if m.in_layer else outside for m in self.meta_model.matrices]
        self.tiles = tiles_of(self.meta_model.matrices, how, self.tile_values)
        self._attention = self._attention_kernel()
        self._demand = MemoryRequest(
            shape=model.shape,
            tiles=self.tiles,
            cache=self.cached,
            compute_bytes=self._compute_bytes,
            cast_bytes=sum(  # each way keeps its buffer
                max(b.shape[0] * b.shape[1] for b in self.tiles if b.stored == stored) * way.cast_bytes
                for stored, way in self._ways.items()
            ),
            small=self._small_values() * self._compute_bytes,
            attention=self._attention_memory(),
            max_sequence=job.max_sequence,
            mean_sequence=job.mean_sequence,
        )
        self.plan = self._placed()
        self.streamed = [b for b in self.tiles if b.index not in self.plan.resident]
        self.notes = [self.plan.note, self._kernel_note(),
                      f"products by {self._arithmetic.name}, {self._arithmetic.flops / 1e9:.0f} GFLOP/s"]  # fmt: skip

    def start(self, parts: ExitStack) -> Runtime:
        """Converts the checkpoint on first use, binds what stays in memory, starts the streams; `parts` ends them."""
        policy, plan, model, meta_model = self.policy, self.plan, self.model, self.meta_model
        converted = self._converted()
        meta_model.bind({name: converted.table(name) for name in meta_model.tables}, converted.small(), self.device)
        timeline, throttle = Timeline(self.device), Throttle(self.limits.disk_bandwidth)
        reader = TileReader(converted.folder, self.tiles, throttle)
        parts.callback(reader.close)
        resident = self._resident(reader)
        stream = WeightStream(self.streamed, self._ring(reader), timeline, policy.overlap)
        parts.callback(stream.close)
        self._note_direct(reader.direct or not self.streamed, "weights pass")
        products = {how: way.gemm for how, way in self._ways.items()}
        overlap_attention = policy.nano_batches > 1 and policy.nano_overlap
        cache = self._cache(timeline, throttle, parts)
        at_home = self.home is not None
        executor = Executor(
            meta_model, self.tiles, resident, stream, products, timeline, overlap_attention, self.device, at_home
        )
        parts.callback(executor.close)
        if overlap_attention and not executor.overlaps_attention:
            self.notes.append("nano-batches do not overlap: what a layer multiplies before attention fills the ring")
        activation_offload = None
        if policy.activations is not None and policy.activations[2]:
            rows = -(-plan.sequences // policy.num_gpu_batches) + plan.chunk
            batches = policy.num_gpu_batches * policy.nano_batches
            width = model.shape.hidden * self._compute_bytes
            activation_offload = ActivationOffload(
                self._layers, policy.activations[2], batches, rows, width, self.job.scratch, timeline, throttle,
                executor.pause,
            )  # fmt: skip
            parts.callback(activation_offload.close)
            self._note_direct(activation_offload.direct, "activations pass")
        balance = 1
        if self.streamed:
            seconds = sum(b.nbytes for b in self.streamed) / stream.measure()
            balance = int(seconds * self._arithmetic.flops / model.shape.flops(1, 0, 0))
        hadamard = None if policy.kv_bits == 16 else self._hadamard()
        return Runtime(
            executor,
            cache,
            self._attention,
            policy,
            plan,
            balance,
            timeline,
            activation_offload,
            hadamard,
            self.device,
            self.home,
        )

    def report(self) -> LoadReport:
        """What was loaded, once it has started."""
        policy, plan, shape = self.policy, self.plan, self.model.shape
        tiers_bytes = self._weights_by_tier()
        total = sum(tiers_bytes)
        blocks = plan.kv_blocks + plan.host_kv_blocks + plan.disk_kv_blocks
        realised = dataclasses.replace(
            policy,
            compute_dtype=self._arithmetic.dtype,
            weights=(tiers_bytes[0] / total, tiers_bytes[1] / total, tiers_bytes[2] / total),
            cache=self._cache_by_tier(plan.host_kv_blocks / blocks, plan.disk_kv_blocks / blocks),
            activations=policy.activations or self._activations(),
            prefill_chunk=plan.chunk,
        )
        return LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=plan.sequences,
            policy=realised,
            compute_dtype=self._arithmetic.dtype,
            weights_by_tier=tiers_bytes,
            steady_blocks=steady_blocks(policy),
            notes=tuple(filter(None, self.notes)),
        )

    # ------------------------------------------------------------------- what is otherwise with a device

    def _arithmetics(self, layers: Storage, outside: Storage) -> Mapping[Storage, gemm.GemmBackend]:
        """How weights are multiplied, by how they are stored."""
        asked, hidden = self.policy.compute_dtype, self.model.shape.hidden
        dtypes: list[Dtype] = [asked] if asked != "auto" else sorted({self.model.dtype, "float32"})
        ways = {layers: gemm.choose_gemm(layers, hidden, dtypes, self.kernels)}
        if outside != layers:
            ways[outside] = gemm.choose_gemm(outside, hidden, [ways[layers].dtype], self.kernels)
        return ways

    def _attention_kernel(self) -> AttentionKernel:
        return self.kernels.attention(self.cached)

    def _attention_memory(self) -> tuple[int, int]:
        sparse = self.policy.value_sparsity < 1
        longest = self.job.max_sequence
        return self.kernels.attention_memory(self.cached, self.model.shape, longest, self._compute_bytes, sparse)

    def _kernel_note(self) -> str:
        return self.kernels.note

    def _codec(self) -> Quantizer:
        """Of keys and values."""
        return self.kernels.quantizer(self.cached)

    def _hadamard(self) -> Hadamard:
        return self.kernels.hadamard()

    def _small_values(self) -> int:
        """Values that stay in memory whatever happens."""
        return sum(torch.Size(s).numel() for s in self.meta_model.small.values())

    def _placed(self) -> Plan:
        return place(self._demand, self.policy, self.limits.host_memory)

    def _resident(self, reader: TileReader) -> dict[int, torch.Tensor]:
        """Stored bytes of the tiles that stay where they are multiplied."""
        return {i: reader.load(self.tiles[i]) for i in sorted(self.plan.resident)}

    def _ring(self, reader: TileReader) -> Ring:
        return HostRing(self.streamed, self.plan.slots, reader)

    def _cache(self, timeline: Timeline, throttle: Throttle, parts: ExitStack) -> PagedCache:
        plan, shape = self.plan, self.model.shape
        disk = None
        if plan.disk_kv_blocks:
            record = record_bytes(shape, self.cached)
            ahead = self.policy.overlap
            disk = DiskBlocks(
                self.job.scratch, shape.num_layers, plan.disk_kv_blocks, record, timeline, throttle, ahead
            )
            parts.callback(disk.close)
            self._note_direct(disk.direct, "the cache on disk passes")
        return PagedCache(shape, plan.kv_blocks, self.cached, self._codec(), disk)

    def _weights_by_tier(self) -> tuple[int, int, int]:
        """Bytes on the device, in host memory and on disk. The device tier is RAM here: what was asked for it is a part
        of what is in memory."""
        total, on_disk = (sum(b.nbytes for b in tiles) for tiles in (self.tiles, self.streamed))
        device, host, _ = self.policy.weights or (0.0, 1.0, 0.0)
        on_device = int((total - on_disk) * device / (device + host)) if device else 0
        return on_device, total - on_disk - on_device, on_disk

    def _cache_by_tier(self, in_host: float, on_disk: float) -> tuple[float, float, float]:
        device, host, _ = self.policy.cache or (0.0, 1.0, 0.0)
        on_device = (1 - on_disk) * device / (device + host) if device else 0.0
        return on_device, 1 - on_disk - on_device, on_disk

    def _activations(self) -> tuple[float, float, float]:
        return 0.0, 1.0, 0.0

    # ------------------------------------------------------------------- the same everywhere

    def _note_direct(self, direct: bool, what: str) -> None:
        if not direct:
            self.notes.append(f"the file system refuses direct I/O: {what} through the page cache")

    def _converted(self) -> ConvertedCheckpoint:
        meta_model = self.meta_model
        source = CheckpointReader(self.model, meta_model.prefix, meta_model.aliases, meta_model.transforms)
        quantizers = {how: self.kernels.quantizer(how) for how in self._ways}
        return convert(self.model, source, meta_model.matrices, self.tiles, quantizers, meta_model.tables,
                       meta_model.small, self.job.cache, self.job.on_progress)  # fmt: skip
