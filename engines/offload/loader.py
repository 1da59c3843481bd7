"""From a model, a policy and limits to a model that is ready to run, in one line of steps for every backend."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from engines.common.freed_memory import return_freed_memory
from engines.offload.backend.base import Backend, LoadRequest, Placement
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import HostKernels, KernelSet, WeightPack
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.load_options import choose_option, options, source_and_layout, unwritten_bytes, with_tiles
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile, joined_spans, matrix_spans
from engines.offload.memory.plan import MemoryPlan, mib
from engines.offload.memory.rows import io_compute_balance_rows
from engines.offload.memory.storage import Panels, Plain, WeightStorage
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.direct_calls import call_directly
from engines.offload.model.fused_norms import fuse_rms_norms
from engines.offload.model.fused_rotary import fuse_rotary
from engines.offload.model.meta_model import MetaModel
from engines.offload.pass_ops import AttentionOverlap, attention_overlaps, pass_ops, tiles_held
from engines.offload.prefill_budget import steady_blocks
from engines.offload.weights.convert import ConvertedCheckpoint, convert
from engines.offload.weights.gemm import GemmBackend, with_plain_panels
from engines.offload.weights.host_experts import HostExperts
from engines.offload.weights.kept_choices import KeptChoices
from engines.offload.weights.kept_usage import KeptUsage
from engines.offload.weights.stream import WeightStream
from engines.offload.weights.tile_reader import TileReader
from engines.offload.weights.torch_threads import choose_torch_threads
from harness.api import Arithmetic, Dtype, LoadReport, ModelShape, OffloadPolicy


def load(request: LoadRequest, backend: Backend, host_kernels: HostKernels, stack: ExitStack) -> LoadedModel:
    """Plans the memory, converts the checkpoint on first use, reads what stays resident and starts the stream.

    `host_kernels` convert checkpoints; `stack` ends what was started. Raises as OffloadEngine.load does.
    """
    model, policy, limits = request.model, request.policy, request.limits
    _keep_to_limits(request)
    sparse = policy.value_sparsity < 1
    option, why = choose_option(options(request, backend), request)
    chosen, gemm, meta_model, needs = option.gemms, option.gemm, option.meta_model, option.needs
    gemms = with_plain_panels(chosen.values())
    offloaded_layers = meta_model.layers() if backend.moves_activations else ()
    tiles, compute_bytes = needs.tiles, needs.compute_bytes
    kernel = backend.kernels.attention(needs.cache, sparse)
    # each option was planned on this backend, which goes by its last plan: plan the chosen one again
    plan = backend.plan(needs, gemm, partial(unwritten_bytes, request, meta_model, tiles))

    # weights
    timeline, throttle = backend.timeline, Throttle(limits.disk_bandwidth)
    converted = _converted(request, meta_model, tiles, host_kernels)
    if converted.tiles != tiles:  # some weights were too varied for twelve bits
        tiles = converted.tiles
        plan = backend.plan(with_tiles(needs, tiles, gemms), gemm, lambda: 0)
    tables = {name: converted.table(name) for name in meta_model.tables}
    meta_model.bind(tables, converted.small(), backend.device, request.job.reproducible)
    fused = _fuse(meta_model, backend.kernels)
    stack.callback(meta_model.use, None)  # the executor: a cycle that would keep resident weights
    reader = TileReader(converted.folder, tiles, throttle)
    stack.callback(reader.close)
    streamed = [tile for tile in tiles if tile.index not in plan.resident]
    resident, ring = backend.weights(reader, streamed)
    host_experts = backend.host_experts(stack)
    likely = _copied_ahead(needs.usage, streamed, plan.sequences, policy, host_experts)
    stream = WeightStream(streamed, ring, timeline, policy.overlap, likely)
    stack.callback(stream.close)
    rows = -(-plan.sequences // policy.num_gpu_batches) + plan.chunk  # of a batch in a pass, at most
    torch.set_num_threads(_torch_threads(gemms.values(), rows, model.shape, gemm.dtype, host_kernels))

    # KV cache and activations
    cache = backend.kv_cache(throttle, stack)
    offload = None
    if backend.moves_activations:
        activations = backend.activations(policy.batches_per_pass, rows, model.shape.hidden * compute_bytes, throttle)
        offload = ActivationOffload(offloaded_layers, activations, backend.placement().activations[2])
        stack.callback(offload.close)
    call_directly(meta_model.module)

    load_rate = stream.measure() if streamed else 1.0  # waits until the ring is full
    balance = io_compute_balance_rows(
        partial(needs.usage.expected_bytes, streamed), load_rate, gemm.flops, request.shape, request.links_wait_s
    )
    notes = [
        *backend.notes(),
        converted.note,
        f"products by {gemm.name}, {gemm.flops / 1e9:.0f} GFLOP/s",
        why,
        fused,
        _exact12_note(tiles),
        *_usage_notes(needs.usage, option.kept_usage, streamed, plan),
        *_buffered(reader.direct or not streamed, cache, offload),
    ]
    overlaps: Sequence[AttentionOverlap] = ()
    kernel_beside = kernel
    if policy.overlaps_nano_batches:
        overlaps, policy, note = _overlaps(meta_model, tiles, plan, policy, stream.slots)
        notes.append(note)
        if (order := policy.nano_order) and order.attention < 1:
            threads = max(1, round(order.attention * host_kernels.threads))
            kernel_beside = HostKernels(host_kernels.cache, threads).attention(needs.cache, sparse)
    realised = replace(policy, cpu_attention=cache.host_attention is not None)
    return LoadedModel(
        model=model,
        policy=policy,
        plan=plan,
        meta_model=meta_model,
        device=backend.device,
        tiles=tiles,
        resident=resident,
        check_tables=converted.check_tables,
        stream=stream,
        host_experts=host_experts,
        expert_usage=needs.usage,
        expert_counts=option.kept_usage,
        gemms=gemms,
        overlaps=overlaps,
        cache=cache,
        attention=kernel,
        attention_beside=kernel_beside,
        hadamard=None if policy.kv_bits == 16 else backend.kernels.hadamard(),
        activation_offload=offload,
        io_compute_balance_rows=balance,
        timeline=timeline,
        report=_report(model.shape, realised, plan, backend.placement(), gemm.arithmetic, notes),
    )


def _copied_ahead(
    usage: ExpertUsage, streamed: Sequence[WeightTile], rows: int, policy: OffloadPolicy, host: HostExperts | None
) -> list[int]:
    """Indices of the tiles to read before a pass of so many rows has routed any."""
    likely = usage.likely(streamed, rows)
    return likely if host is None else host.split.to_copy(likely, rows, policy.batches_per_pass)


def _torch_threads(
    ways: Iterable[GemmBackend], rows: int, shape: ModelShape, dtype: Dtype, kernels: HostKernels
) -> int:
    """Threads of torch's for what is beside products, in a batch of so many rows."""
    return choose_torch_threads([way.pool for way in ways], rows, shape.hidden, dtype, KeptChoices(kernels.cache))


def _overlaps(
    model: MetaModel, tiles: Sequence[WeightTile], plan: MemoryPlan, policy: OffloadPolicy, slots: int
) -> tuple[Sequence[AttentionOverlap], OffloadPolicy, str]:
    """Which attentions nano-batches overlap in a ring of so many slots; the policy, without an order of products that
    would need more of them; and a note on what is missing, or nothing."""
    streamed = [i not in plan.resident for i in range(len(tiles))]
    group_of = {matrix.name: matrix.group for matrix in model.matrices}
    spans = joined_spans(matrix_spans(tiles), model.joins)
    groups = [group_of[join[0]] for join in model.joins]
    overlaps, order = attention_overlaps(spans, groups, model.attends, streamed, slots), policy.nano_order
    apart = replace(policy, nano_batches=policy.nano_count)
    if not overlaps:
        return overlaps, apart, "nano-batches do not overlap: what a layer multiplies before attention fills the ring"
    if order is not None:
        held = tiles_held(pass_ops(streamed, spans, order.nano_batches, overlaps, order))
        if held >= max(1, slots):
            return overlaps, apart, (f"the order of nano_batches keeps {held} tiles, and the ring has {slots}: "
                                     "nano-batches overlap attention only")  # fmt: skip
    return overlaps, policy, ""


def _fuse(model: MetaModel, kernels: KernelSet) -> str:
    """Has kernels compute what the module's own code computes in many operations. Returns a note where rotary
    embeddings stay the module's, or nothing; norms are too varied to speak of those that do."""
    if (norm := kernels.rms_norm()) is not None:
        fuse_rms_norms(model.module, norm)
    if (rotary := kernels.rotary()) is not None:
        fused, left = fuse_rotary(model.module, rotary, model.dtype)
        if left:
            return (f"slower rotary embeddings in {left} of {fused + left} layers: the model's own code, which does "
                    "not compute what the kernel does")  # fmt: skip
    return ""


def _keep_to_limits(request: LoadRequest) -> None:
    """Has memory that a mixture's passes free go back to the system where its limit needs it: they allocate in many
    sizes. Passes of other models would only have the same pages cleared again."""
    if request.limits.host_memory is not None and request.model.shape.params_idle:
        return_freed_memory()


def _converted(
    request: LoadRequest, meta_model: MetaModel, tiles: Sequence[WeightTile], kernels: HostKernels
) -> ConvertedCheckpoint:
    """The checkpoint, converted on first use."""
    packers: dict[WeightStorage, WeightPack] = {}
    for stored in dict.fromkeys(tile.stored for tile in tiles):
        if not isinstance(stored, Plain):
            packers[stored] = kernels.weight_packer(stored)
    source, layout = source_and_layout(request, meta_model, tiles)
    return convert(request.model, source, layout, packers, request.job.cache, request.job.on_progress)


def _exact12_note(tiles: Sequence[WeightTile]) -> str:
    """What twelve bits save, in words; empty where there are none."""
    packed = [tile for tile in tiles if isinstance(tile.stored, Panels) and tile.stored.exact12]
    if not packed:
        return ""
    plain = sum(Panels().matrix_bytes(*tile.shape) for tile in packed)
    also = f", {len(tiles) - len(packed)} of {len(tiles)} tiles plain" if len(packed) < len(tiles) else ""
    return f"bfloat16 in 12 exact bits: {mib(sum(tile.nbytes for tile in packed))} instead of {mib(plain)}{also}"


def _usage_notes(usage: ExpertUsage, kept: KeptUsage, streamed: Sequence[WeightTile], plan: MemoryPlan) -> list[str]:
    """What placement knew of a mixture's experts, and what that saves; none for a model without."""
    if not usage.experts:
        return []
    passes = max((counts.passes for counts in usage.counts.values()), default=0)
    known = f"as counted in {passes} passes" if passes else "taken to be uniform: none is counted yet"
    expected = usage.expected_bytes(streamed, plan.sequences)
    whole = sum(tile.nbytes for tile in streamed)
    reads = f"; a pass of {plan.sequences} rows reads about {mib(expected)} of {mib(whole)}" if streamed else ""
    return [kept.note, f"use of experts {known}{reads}"]


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
