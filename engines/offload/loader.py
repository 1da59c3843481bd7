"""From a model, a policy and limits to a model that is ready to run, in one line of steps for every backend."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from engines.offload.backend.base import Backend, LoadRequest, Placement
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import HostKernels, WeightPack
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.layout import WeightTile, matrix_spans, model_tiles
from engines.offload.memory.plan import MemoryPlan, MemoryRequest, mib
from engines.offload.memory.rows import io_compute_balance_rows
from engines.offload.memory.storage import Panels, Plain, WeightStorage, storages
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import MetaModel
from engines.offload.pass_ops import AttentionOverlap, attention_overlaps
from engines.offload.scheduler import steady_blocks
from engines.offload.weights.checkpoint_reader import CheckpointReader
from engines.offload.weights.convert import CheckpointLayout, ConvertedCheckpoint, convert
from engines.offload.weights.gemm import GemmBackend, with_plain_panels
from engines.offload.weights.stream import WeightStream
from engines.offload.weights.tile_reader import TileReader
from harness.api import DTYPE_BYTES, Arithmetic, LoadReport, ModelShape, OffloadPolicy


def load(request: LoadRequest, backend: Backend, host_kernels: HostKernels, stack: ExitStack) -> LoadedModel:
    """Plans the memory, converts the checkpoint on first use, reads what stays resident and starts the stream.

    `host_kernels` convert checkpoints; `stack` ends what was started. Raises as OffloadEngine.load does.
    """
    model, policy, limits, job = request.model, request.policy, request.limits, request.job
    layers, outside, cached = storages(model.dtype, policy)
    sparse = policy.value_sparsity < 1
    offloaded_share = policy.activations[2] if policy.activations else 0.0  # of activations

    # what is computed, and how
    chosen = backend.choose_gemms(layers, outside)
    gemm, gemms = chosen[layers], with_plain_panels(chosen.values())
    meta_model = MetaModel(Path(model.path), model.shape, getattr(torch, gemm.dtype))
    backend.require(meta_model)
    offloaded_layers = meta_model.layers() if offloaded_share else ()
    tiles: Sequence[WeightTile] = model_tiles(
        meta_model.matrices, gemm.stored, chosen[outside].stored, backend.tile_values
    )
    kernel = backend.kernels.attention(cached, sparse)

    # what goes where
    compute_bytes = DTYPE_BYTES[gemm.dtype]
    needs = MemoryRequest(
        shape=model.shape,
        tiles=tiles,
        cache=cached,
        compute_bytes=compute_bytes,
        cast_bytes=_cast_bytes(tiles, gemms),
        small_bytes=backend.bound_values(meta_model) * compute_bytes,
        attention_bytes=backend.kernels.attention_memory(cached, model.shape, job.max_sequence, compute_bytes, sparse),
        max_sequence=job.max_sequence,
        mean_sequence=job.mean_sequence,
    )
    plan = backend.plan(needs)

    # weights
    timeline, throttle = backend.timeline, Throttle(limits.disk_bandwidth)
    converted = _converted(request, meta_model, tiles, host_kernels)
    if converted.tiles != tiles:  # some weights were too varied for twelve bits
        tiles = converted.tiles
        plan = backend.plan(replace(needs, tiles=tiles, cast_bytes=_cast_bytes(tiles, gemms)))
    tables = {name: converted.table(name) for name in meta_model.tables}
    meta_model.bind(tables, converted.small(), backend.device)
    stack.callback(setattr, meta_model, "weights", None)  # the executor: a cycle that would keep resident weights
    reader = TileReader(converted.folder, tiles, throttle)
    stack.callback(reader.close)
    streamed = [tile for tile in tiles if tile.index not in plan.resident]
    resident, ring = backend.weights(reader, streamed)
    stream = WeightStream(streamed, ring, timeline, policy.overlap)
    stack.callback(stream.close)

    # KV cache and activations
    cache = backend.kv_cache(throttle, stack)
    offload = None
    if offloaded_share:
        rows = -(-plan.sequences // policy.num_gpu_batches) + plan.chunk
        batches = policy.num_gpu_batches * policy.nano_batches
        width = model.shape.hidden * compute_bytes
        offload = ActivationOffload(
            offloaded_layers, offloaded_share, batches, rows, width, job.scratch, timeline, throttle
        )
        stack.callback(offload.close)

    load_rate = stream.measure() if streamed else 1.0  # waits until the ring is full
    balance = io_compute_balance_rows(sum(tile.nbytes for tile in streamed), load_rate, gemm.flops, model.shape)
    notes = [*backend.notes(), converted.note, f"products by {gemm.name}, {gemm.flops / 1e9:.0f} GFLOP/s"]
    notes += [_exact12_note(tiles), *_buffered(reader.direct or not streamed, cache, offload)]
    overlaps: Sequence[AttentionOverlap] = ()
    if policy.nano_batches > 1 and policy.nano_overlap:
        is_streamed = [i not in plan.resident for i in range(len(tiles))]
        groups = [matrix.group for matrix in meta_model.matrices]
        overlaps = attention_overlaps(matrix_spans(tiles), groups, meta_model.attends, is_streamed, stream.slots)
        if not overlaps:
            notes.append("nano-batches do not overlap: what a layer multiplies before attention fills the ring")
    realised = replace(policy, cpu_attention=cache.host_attention is not None)
    return LoadedModel(
        model=model,
        policy=policy,
        plan=plan,
        meta_model=meta_model,
        device=backend.device,
        tiles=tiles,
        resident=resident,
        stream=stream,
        gemms=gemms,
        overlaps=overlaps,
        cache=cache,
        attention=kernel,
        hadamard=None if policy.kv_bits == 16 else backend.kernels.hadamard(),
        activation_offload=offload,
        io_compute_balance_rows=balance,
        timeline=timeline,
        report=_report(model.shape, realised, plan, backend.placement(), gemm.arithmetic, notes),
    )


def _converted(
    request: LoadRequest, meta_model: MetaModel, tiles: Sequence[WeightTile], kernels: HostKernels
) -> ConvertedCheckpoint:
    """The checkpoint, converted on first use."""
    source = CheckpointReader(request.model, meta_model.prefix, meta_model.aliases, meta_model.transforms)
    packers: dict[WeightStorage, WeightPack] = {}
    for stored in dict.fromkeys(tile.stored for tile in tiles):
        if not isinstance(stored, Plain):
            packers[stored] = kernels.weight_packer(stored)
    layout = CheckpointLayout(meta_model.matrices, tiles, meta_model.tables, meta_model.small)
    return convert(request.model, source, layout, packers, request.job.cache, request.job.on_progress)


def _exact12_note(tiles: Sequence[WeightTile]) -> str:
    """What twelve bits save, in words; empty where there are none."""
    packed = [tile for tile in tiles if isinstance(tile.stored, Panels) and tile.stored.exact12]
    if not packed:
        return ""
    plain = sum(Panels().matrix_bytes(*tile.shape) for tile in packed)
    also = f", {len(tiles) - len(packed)} of {len(tiles)} tiles plain" if len(packed) < len(tiles) else ""
    return f"bfloat16 in 12 exact bits: {mib(sum(tile.nbytes for tile in packed))} instead of {mib(plain)}{also}"


def _buffered(direct: bool, cache: PagedCache, offload: ActivationOffload | None) -> list[str]:
    """Notes on what passes through the page cache; `direct`: weights do not."""
    known = {
        "weights": direct,
        "KV blocks": cache.offloaded is None or cache.offloaded.direct,
        "activations": offload is None or offload.direct,
    }
    return [
        f"the file system refuses direct I/O: {what} pass through the page cache" for what in known if not known[what]
    ]


def _cast_bytes(tiles: Sequence[WeightTile], gemms: Mapping[WeightStorage, GemmBackend]) -> int:
    """Bytes of the buffers that tiles are unpacked or cast into: each way to multiply keeps one of its largest tile."""
    return sum(
        max((tile.shape[0] * tile.shape[1] for tile in tiles if tile.stored == stored), default=0) * gemm.cast_bytes
        for stored, gemm in gemms.items()
    )


def _report(
    shape: ModelShape, policy: OffloadPolicy, plan: MemoryPlan, placement: Placement, arithmetic: Arithmetic,
    notes: list[str],
) -> LoadReport:  # fmt: skip
    total = sum(placement.weights)
    device, host, disk = (nbytes / total for nbytes in placement.weights)
    policy = replace(
        policy,
        compute_dtype=arithmetic,
        weights=(device, host, disk),
        cache=placement.cache,
        activations=placement.activations,
        prefill_chunk=plan.chunk,
    )
    return LoadReport(
        vocab=shape.vocab,
        max_context=shape.max_context,
        block_size=plan.sequences,
        policy=policy,
        compute_dtype=arithmetic,
        weights_by_tier=placement.weights,
        steady_blocks=steady_blocks(policy),
        notes=tuple(filter(None, notes)),
    )
