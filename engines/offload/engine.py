"""The offload engine behind the Engine protocol: load, generate, score."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engines import requests as checks
from engines.offload import gemm, tiers
from engines.offload.executor import Executor
from engines.offload.kernels import (
    AttentionKernel,
    NoCompilerError,
    compiled_attention,
    compiled_memory,
    reference_attention,
    reference_memory,
)
from engines.offload.kv_cache import PagedCache
from engines.offload.layout import Block, blocks_of
from engines.offload.model import SeamedModel
from engines.offload.runtime import Runtime
from engines.offload.sequences import Generation, Scoring
from engines.offload.source import Source
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from engines.offload.weights import convert
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    HarnessError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    Score,
    UnsupportedError,
)

_HONOURED = ("gpu_batch_size", "num_gpu_batches", "schedule", "weights", "cache", "activations", "prefill_chunk",
             "compute_dtype")  # fmt: skip
#: Blocks of requests after which a sweep's start and end no longer weigh much in its throughput.
_SWEEP_BLOCKS = 4


class OffloadEngine:
    """Any decoder that the seams carry, its weights streamed from disk in `row`, `zigzag` or `sweep` order."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._seamed: SeamedModel | None = None
        self._stream: BlockStream | None = None
        self._threads: int | None = None  # torch's own setting, where a limit has changed it

    def capabilities(self) -> Capabilities:
        return Capabilities(
            phased=False,
            packages=("torch", "transformers", "safetensors", "accelerate", "greenlet", "numpy"),
            batch_policy=OffloadPolicy(schedule="sweep", gpu_batch_size=256),
        )

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        """Plans the memory, converts the checkpoint on first use, starts the stream.

        Raises UnsupportedError for models and policies it cannot run and InfeasibleError for too small a budget,
        both before weights are read or written.
        """
        self.close()
        policy.require_defaults_except("offload", *_HONOURED)
        if policy.num_gpu_batches > 1 and policy.schedule != "zigzag":
            raise UnsupportedError(f"policy.num_gpu_batches is for zigzag; a {policy.schedule} pass has one batch")
        if limits.threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(limits.threads)
        arithmetic = gemm.choose(model, policy, job.cache)
        seamed = SeamedModel(Path(model.path), model.shape, getattr(torch, arithmetic.dtype))
        self._seamed = seamed  # so that `close` finds it even where the rest fails
        kernel, kernel_note = _kernel(job.cache)
        blocks = blocks_of(seamed.matrices, DTYPE_BYTES[model.dtype])
        demand = tiers.Demand(
            shape=model.shape,
            blocks=blocks,
            stored_bytes=DTYPE_BYTES[model.dtype],
            compute_bytes=DTYPE_BYTES[arithmetic.dtype],
            cast_bytes=0 if arithmetic.weights == model.dtype else DTYPE_BYTES[arithmetic.weights],
            small=sum(torch.Size(s).numel() for s in seamed.small.values()) * DTYPE_BYTES[arithmetic.dtype],
            attention=(
                reference_memory(model.shape, job.max_sequence, DTYPE_BYTES[model.dtype], DTYPE_BYTES[arithmetic.dtype])
                if kernel is reference_attention
                else compiled_memory(model.shape, job.max_sequence, torch.get_num_threads())
            ),
            max_sequence=job.max_sequence,
            mean_sequence=job.mean_sequence,
        )
        plan = tiers.place(demand, policy, limits.host_memory)
        source = Source(model, seamed.prefix, seamed.aliases, seamed.transforms)
        converted = convert(
            model, source, seamed.matrices, blocks, seamed.tables, seamed.small, job.cache, job.on_progress
        )
        seamed.bind({name: converted.table(name) for name in seamed.tables}, converted.small())
        resident = converted.read(plan.resident)
        streamed = [b for i, b in enumerate(blocks) if i not in resident]
        timeline = Timeline()
        stream = self._stream = BlockStream(converted.folder, streamed, plan.slots, timeline)
        executor = Executor(seamed, blocks, converted.dtype, resident, stream, arithmetic, timeline)
        cache = PagedCache(model.shape, plan.pages, converted.dtype)
        on_disk = sum(b.nbytes for b in streamed)
        balance = int(on_disk / stream.measure() * arithmetic.flops / model.shape.flops(1, 0, 0)) if streamed else 1
        self._runtime = Runtime(executor, cache, kernel, policy, plan, balance, timeline)
        self._model, self._plan = model, plan
        notes = [plan.note, f"products by {arithmetic.name}, {arithmetic.flops / 1e9:.0f} GFLOP/s", kernel_note]
        notes += ["" if stream.direct else "the file system refuses direct I/O: weights pass through the page cache"]
        return _report(model, policy, plan, blocks, on_disk, arithmetic.dtype, tuple(filter(None, notes)))

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        runtime, seamed = self._loaded()
        for request in requests:
            checks.validate(request, self._model.shape)
            tokens = len(request.prompt) + request.sampling.max_tokens - 1
            runtime.require_pages(f"request {request.id}", tokens)
        decode = checks.decoder(self._model.path) if any(r.sampling.stop for r in requests) else None
        active = [Generation(r, seamed.eos, decode) for r in requests]
        return (sequence.result() for sequence in runtime.run(active))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores from the logits of the continuation's positions only; an empty context becomes the token that
        begins a sequence, or else the one that ends it."""
        runtime, seamed = self._loaded()
        active = []
        for i, (context, continuation) in enumerate(pairs):
            full = checks.full_sequence(i, context, continuation, self._model.shape, seamed.begin)
            runtime.require_pages(f"pair {i}", len(full) - 1)
            active.append(Scoring(i, full, len(continuation)))
        done = {sequence.index: sequence.result() for sequence in runtime.run(active, self._plan.scored_rows)}
        return [done[i] for i in range(len(pairs))]

    def trace(self) -> EngineTrace:
        return self._loaded()[0].timeline.trace()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._seamed is not None:
            self._seamed.weights = None  # a circle, which would keep what is resident until it is collected
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._runtime = self._seamed = self._stream = self._threads = None

    def _loaded(self) -> tuple[Runtime, SeamedModel]:
        if self._runtime is None or self._seamed is None:
            raise HarnessError("engine offload has no model loaded")
        return self._runtime, self._seamed


def _report(
    model: LocalModel, policy: OffloadPolicy, plan: tiers.Plan, blocks: Sequence[Block], on_disk: int, dtype: Dtype,
    notes: tuple[str, ...],
) -> LoadReport:  # fmt: skip
    total = sum(b.nbytes for b in blocks)
    in_memory = total - on_disk
    # the device tier is RAM here: what was asked for it is a part of what is in memory
    device, host, _ = policy.weights or (0.0, 1.0, 0.0)
    on_device = int(in_memory * device / (device + host)) if device else 0
    realised = dataclasses.replace(
        policy,
        compute_dtype=dtype,
        weights=(on_device / total, (in_memory - on_device) / total, on_disk / total),
        cache=policy.cache or (0.0, 1.0, 0.0),
        activations=policy.activations or (0.0, 1.0, 0.0),
        prefill_chunk=plan.chunk,
    )
    return LoadReport(
        vocab=model.shape.vocab,
        max_context=model.shape.max_context,
        block_size=plan.sequences,
        policy=realised,
        compute_dtype=dtype,
        weights_by_tier=(on_device, in_memory - on_device, on_disk),
        steady_blocks=_SWEEP_BLOCKS if policy.schedule == "sweep" else 1,
        notes=notes,
    )


def _kernel(cache: Path) -> tuple[AttentionKernel, str]:
    """The attention kernel, and what to say where it is only the reference."""
    try:
        return compiled_attention(cache, torch.get_num_threads()), ""
    except NoCompilerError as exc:
        return reference_attention, f"no kernels of our own, which are faster: {exc}"
