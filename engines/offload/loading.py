"""From a model, a policy and limits to a runtime: what is chosen, planned, converted and started, in this order."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import torch

from engines.offload import gemm, tiers
from engines.offload.batching import steady_blocks
from engines.offload.executor import Executor
from engines.offload.kernels import Kernels
from engines.offload.kv_cache import PagedCache
from engines.offload.kv_disk import DiskPages
from engines.offload.layout import blocks_of
from engines.offload.model import SeamedModel
from engines.offload.pages import record_bytes
from engines.offload.runtime import Runtime
from engines.offload.source import Source
from engines.offload.standin import Parking
from engines.offload.storage import storages
from engines.offload.throttle import Throttle
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from engines.offload.weights import Converted, convert
from harness.api import DTYPE_BYTES, Dtype, HardwareLimits, Job, LoadReport, LocalModel, OffloadPolicy


class Loading:
    """One model being loaded. What is chosen and planned is so once this exists; nothing has been read or written.

    Raises UnsupportedError for models and policies that the engine cannot run, InfeasibleError for too small a budget.
    """

    def __init__(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> None:
        self._model = model
        self._policy = policy
        self._limits = limits
        self._job = job
        self._kernels = Kernels(job.cache, torch.get_num_threads())
        layers, outside, self._cached = storages(model.dtype, policy)
        asked = policy.compute_dtype
        dtypes: list[Dtype] = [asked] if asked != "auto" else sorted({model.dtype, "float32"})
        self._arithmetic = gemm.choose(layers, model.shape.hidden, dtypes, self._kernels)
        self._ways = {layers: self._arithmetic}
        if outside != layers:
            same = [self._arithmetic.dtype]
            self._ways[outside] = gemm.choose(outside, model.shape.hidden, same, self._kernels)
        self.seamed = SeamedModel(Path(model.path), model.shape, getattr(torch, self._arithmetic.dtype))
        parks = policy.activations is not None and policy.activations[2] > 0
        self._layers = self.seamed.layers() if parks else ()
        self._compute_bytes = DTYPE_BYTES[self._arithmetic.dtype]
        self._blocks = blocks_of(
            self.seamed.matrices, [layers if m.in_layer else outside for m in self.seamed.matrices]
        )
        self._attention = self._kernels.attention(self._cached)
        sparse = policy.value_sparsity < 1
        demand = tiers.Demand(
            shape=model.shape,
            blocks=self._blocks,
            cache=self._cached,
            compute_bytes=self._compute_bytes,
            cast_bytes=sum(  # each way keeps its buffer
                max(b.shape[0] * b.shape[1] for b in self._blocks if b.stored == stored) * way.cast_bytes
                for stored, way in self._ways.items()
            ),
            small=sum(torch.Size(s).numel() for s in self.seamed.small.values()) * self._compute_bytes,
            attention=self._kernels.attention_memory(
                self._cached, model.shape, job.max_sequence, self._compute_bytes, sparse
            ),
            max_sequence=job.max_sequence,
            mean_sequence=job.mean_sequence,
        )
        self.plan = tiers.place(demand, policy, limits.host_memory)
        self._streamed = [b for i, b in enumerate(self._blocks) if i not in self.plan.resident]
        self._notes = [self.plan.note, self._kernels.note,
                       f"products by {self._arithmetic.name}, {self._arithmetic.flops / 1e9:.0f} GFLOP/s"]  # fmt: skip

    def start(self, parts: ExitStack) -> Runtime:
        """Converts the checkpoint on first use, binds what stays in memory, starts the streams; `parts` ends them."""
        policy, plan, model, seamed = self._policy, self.plan, self._model, self.seamed
        converted = self._converted()
        seamed.bind({name: converted.table(name) for name in seamed.tables}, converted.small())
        resident = converted.read(plan.resident)
        timeline, throttle = Timeline(), Throttle(self._limits.disk_bandwidth)
        stream = BlockStream(converted.folder, self._streamed, plan.slots, timeline, throttle, policy.overlap)
        parts.callback(stream.close)
        self._note_direct(stream.direct, "weights pass")
        products = {how: way.product for how, way in self._ways.items()}
        turns = policy.nano_batches > 1 and policy.nano_overlap
        executor = Executor(seamed, self._blocks, resident, stream, products, timeline, turns)
        parts.callback(executor.close)
        if turns and not executor.takes_turns:
            self._notes.append("nano-batches do not overlap: what a layer multiplies before attention fills the ring")
        disk = parking = None
        if plan.disk_pages:
            record = record_bytes(model.shape, self._cached)
            layers = model.shape.num_layers
            disk = DiskPages(self._job.scratch, layers, plan.disk_pages, record, timeline, throttle, policy.overlap)
            parts.callback(disk.close)
            self._note_direct(disk.direct, "the cache on disk passes")
        if policy.activations is not None and policy.activations[2]:
            rows = -(-plan.sequences // policy.num_gpu_batches) + plan.chunk
            batches = policy.num_gpu_batches * policy.nano_batches
            width = model.shape.hidden * self._compute_bytes
            parking = Parking(self._layers, policy.activations[2], batches, rows, width, self._job.scratch, timeline,
                              throttle, executor.pause)  # fmt: skip
            parts.callback(parking.close)
            self._note_direct(parking.direct, "activations pass")
        cache = PagedCache(model.shape, plan.pages, self._cached, self._kernels.codec(self._cached), disk)
        balance = 1
        if self._streamed:
            seconds = sum(b.nbytes for b in self._streamed) / stream.measure()
            balance = int(seconds * self._arithmetic.flops / model.shape.flops(1, 0, 0))
        turn = None if policy.kv_bits == 16 else self._kernels.turn()
        return Runtime(executor, cache, self._attention, policy, plan, balance, timeline, parking, turn)

    def report(self) -> LoadReport:
        """What was loaded, once it has started."""
        policy, plan, shape = self._policy, self.plan, self._model.shape
        total, on_disk = (sum(b.nbytes for b in blocks) for blocks in (self._blocks, self._streamed))
        weights = _realised(policy.weights, on_disk / total)
        on_device = int(weights[0] * total)
        realised = dataclasses.replace(
            policy,
            compute_dtype=self._arithmetic.dtype,
            weights=weights,
            cache=_realised(policy.cache, plan.disk_pages / (plan.pages + plan.disk_pages)),
            activations=policy.activations or (0.0, 1.0, 0.0),
            prefill_chunk=plan.chunk,
        )
        return LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=plan.sequences,
            policy=realised,
            compute_dtype=self._arithmetic.dtype,
            weights_by_tier=(on_device, total - on_disk - on_device, on_disk),
            steady_blocks=steady_blocks(policy),
            notes=tuple(filter(None, self._notes)),
        )

    def _note_direct(self, direct: bool, what: str) -> None:
        if not direct:
            self._notes.append(f"the file system refuses direct I/O: {what} through the page cache")

    def _converted(self) -> Converted:
        seamed = self.seamed
        source = Source(self._model, seamed.prefix, seamed.aliases, seamed.transforms)
        codecs = {how: self._kernels.codec(how) for how in self._ways}
        return convert(self._model, source, seamed.matrices, self._blocks, codecs, seamed.tables, seamed.small,
                       self._job.cache, self._job.on_progress)  # fmt: skip


def _realised(asked: tuple[float, float, float] | None, on_disk: float) -> tuple[float, float, float]:
    """Fractions as they came out. The device tier is RAM here: what was asked for it is a part of what is in memory."""
    device, host, _ = asked or (0.0, 1.0, 0.0)
    on_device = (1 - on_disk) * device / (device + host) if device else 0.0
    return (on_device, 1 - on_disk - on_device, on_disk)
