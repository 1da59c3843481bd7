"""The offload engine behind the Engine protocol: load, generate, score."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from engines import requests as checks
from engines.calibrate import gemm_rates
from engines.offload import tiers
from engines.offload.attention import PackedAttention, Segment
from engines.offload.batching import Batcher, BlockBatcher, ChunkRule, Part, SweepBatcher
from engines.offload.executor import Executor
from engines.offload.kernels import DecodeKernel, compiled_decode, reference_decode
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kv_cache import PagedCache, pages_for
from engines.offload.model import PackedBatch, SeamedModel
from engines.offload.sequences import ActiveSequence, Generation, Scoring
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from engines.offload.weights import Converted, Source, convert
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
)

S = TypeVar("S", bound=ActiveSequence)
_HONOURED = ("gpu_batch_size", "num_gpu_batches", "schedule", "weights", "cache", "activations", "prefill_chunk",
             "compute_dtype")  # fmt: skip
#: Rows at which the compute dtype is chosen: a pass of some prompts and many decoding sequences.
_TYPICAL_ROWS = 256


class OffloadEngine:
    """Any decoder that the seams carry, its weights streamed from disk in `row`, `zigzag` or `sweep` order."""

    def __init__(self) -> None:
        self._stream: BlockStream | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(
            phased=False, packages=("torch", "transformers", "safetensors", "accelerate", "greenlet", "numpy")
        )

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        """Converts the checkpoint on first use, plans the memory, starts the stream.

        Raises UnsupportedError for models and policies it cannot run, InfeasibleError for too small a budget.
        """
        policy.require_defaults_except("offload", *_HONOURED)
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
        dtype, rate = _compute_dtype(model, policy)
        seamed = SeamedModel(Path(model.path), getattr(torch, dtype))
        source = Source(model, seamed.prefix, seamed.aliases)
        converted = convert(model, source, seamed.matrices, seamed.tables, seamed.small, job.cache, job.on_progress)
        del source
        small = converted.small()
        kernel, kernel_note = _kernel(job.cache)
        placement = tiers.place(
            tiers.Demand(
                shape=model.shape,
                blocks=converted.blocks,
                compute_bytes=DTYPE_BYTES[dtype],
                cache_bytes=DTYPE_BYTES[model.dtype],
                small=sum(t.numel() for t in small.values()) * DTYPE_BYTES[dtype],
                cast=0 if dtype == model.dtype else _largest(converted) * DTYPE_BYTES[dtype],
                max_sequence=job.max_sequence,
            ),
            policy,
            limits.host_memory,
        )
        seamed.bind({name: converted.table(name) for name in seamed.tables}, small)
        resident = _read_resident(converted, placement.resident)
        streamed = [b for i, b in enumerate(converted.blocks) if i not in resident]
        self._timeline = Timeline()
        self._stream = BlockStream(converted.folder, streamed, placement.slots, self._timeline)
        self._executor = Executor(
            seamed, converted.blocks, converted.dtype, resident, self._stream, placement.slots, self._timeline
        )
        self._cache = PagedCache(model.shape, placement.pages, converted.dtype)
        self._model, self._seamed, self._policy, self._placement, self._kernel = (
            model, seamed, policy, placement, kernel,
        )  # fmt: skip
        on_disk = sum(b.nbytes for b in streamed)
        self._balance = _balance(model, on_disk, self._stream, rate)
        held = sum(b.nbytes for b in converted.blocks) - on_disk
        total = held + on_disk
        notes = [*placement.notes, kernel_note, f"rows at which compute hides loading: {self._balance}"]
        if streamed and not self._stream.direct:
            notes.append("the file system refuses direct I/O: weights pass through the page cache")
        return LoadReport(
            vocab=model.shape.vocab,
            max_context=model.shape.max_context,
            block_size=min(placement.sequences, placement.pages // pages_for(job.mean_sequence)),
            policy=dataclasses.replace(
                policy,
                compute_dtype=dtype,
                weights=(0.0, held / total, on_disk / total),
                cache=(0.0, 1.0, 0.0),
                activations=(0.0, 1.0, 0.0),
                prefill_chunk=placement.chunk,
            ),
            compute_dtype=dtype,
            weights_by_tier=(0, held, on_disk),
            notes=tuple(filter(None, notes)),
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        for request in requests:
            checks.validate(request, self._model.shape)
            tokens = len(request.prompt) + request.sampling.max_tokens - 1
            self._require_pages(f"request {request.id}", tokens)
        decode = checks.decoder(self._model.path) if any(r.sampling.stop for r in requests) else None
        active = [Generation(r, self._seamed.eos, decode) for r in requests]
        return (sequence.result() for sequence in self._run(active))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores from the logits of the continuation's positions only; an empty context becomes the token that
        begins a sequence, or else the one that ends it."""
        active = []
        for i, (context, continuation) in enumerate(pairs):
            full = checks.full_sequence(i, context, continuation, self._model.shape, self._seamed.begin)
            self._require_pages(f"pair {i}", len(full) - 1)
            active.append(Scoring(i, full, len(continuation)))
        done = {sequence.index: sequence.result() for sequence in self._run(active)}
        return [done[i] for i in range(len(pairs))]

    def trace(self) -> EngineTrace:
        return self._timeline.trace()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # ------------------------------------------------------------------------------ passes

    def _run(self, sequences: Sequence[S]) -> Iterator[S]:
        """Runs passes until all are done; yields each as it is."""
        batcher = self._batcher(sequences)
        self._timeline.clear()
        began = time.perf_counter()
        while (arrival := batcher.next_arrival_s) is not None:
            now = time.perf_counter() - began
            batches = batcher.next_pass(now) if arrival <= now else []
            if not batches:
                time.sleep(max(0.0, arrival - now))
                continue
            yield from self._pass(batcher, batches, began)  # type: ignore[misc]

    def _pass(self, batcher: Batcher, batches: list[list[Part]], began: float) -> list[ActiveSequence]:
        for part in (p for batch in batches for p in batch):
            if part.sequence.start_s < 0:
                part.sequence.start_s = time.perf_counter() - began
        wanted = [[len(p.sequence.wanted(p.count)) for p in batch] for batch in batches]
        done = []
        with torch.inference_mode():
            logits = self._executor.run([self._pack(batch) for batch in batches])
            self._timeline.end_pass(sum(p.count for batch in batches for p in batch))
            now = time.perf_counter() - began
            for batch, counts, rows in zip(batches, wanted, logits, strict=True):
                for part, own in zip(batch, torch.split(rows, counts), strict=True):
                    part.sequence.cached += part.count
                    if part.sequence.consume(own, now):
                        batcher.finish(part.sequence)
                        done.append(part.sequence)
        return done

    def _pack(self, batch: Sequence[Part]) -> PackedBatch:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments = []
        for part in batch:
            sequence, start = part.sequence, part.sequence.cached
            rows += [len(ids) + position - start for position in sequence.wanted(part.count)]
            ids += sequence.tokens[start : start + part.count]
            positions += range(start, start + part.count)
            segments.append(Segment(part.count, start, tuple(sequence.pages)))
        attention = PackedAttention(self._cache, segments, self._kernel, self._timeline)
        return PackedBatch(torch.tensor(ids), torch.tensor(positions), torch.tensor(rows, dtype=torch.long), attention)

    def _batcher(self, sequences: Sequence[ActiveSequence]) -> Batcher:
        policy, placement = self._policy, self._placement
        if policy.schedule == "sweep":
            prompts = sum(len(s.tokens) for s in sequences)
            steps = sum(s.steps_left for s in sequences)
            average = pages_for((prompts + steps // 2) // max(1, len(sequences)))
            together = min(placement.sequences, self._cache.pages // average)
            steady = -(-together * prompts // max(1, steps))
            rule = ChunkRule(steady, self._balance, placement.chunk)
            return SweepBatcher(sequences, self._cache, placement.sequences, rule)
        batches = policy.num_gpu_batches if policy.schedule == "zigzag" else 1
        return BlockBatcher(sequences, self._cache, policy.gpu_batch_size, batches, placement.chunk)

    def _require_pages(self, what: str, tokens: int) -> None:
        if pages_for(tokens) > self._cache.pages:
            raise HarnessError(
                f"{what}: its {tokens} tokens can never fit a cache of {self._cache.pages} pages; "
                "give the engine more memory or shorten it"
            )


def _compute_dtype(model: LocalModel, policy: OffloadPolicy) -> tuple[Dtype, float]:
    """The dtype asked for, or the faster of the stored one and float32 on this CPU; and its FLOP/s."""
    choices = {model.dtype, "float32"} if policy.compute_dtype == "auto" else {policy.compute_dtype}
    width = min(model.shape.hidden, 2048)
    rates = gemm_rates(sorted(choices), [_TYPICAL_ROWS], width, width, rotated_bytes=0)
    best = {dtype: max(samples[str(_TYPICAL_ROWS)]) for dtype, samples in rates.items()}
    fastest: Any = max(best, key=lambda d: best[d])
    return fastest, best[fastest]


def _kernel(cache: Path) -> tuple[DecodeKernel, str]:
    """The decode kernel, and what to say where it is only the reference."""
    try:
        return compiled_decode(cache, torch.get_num_threads()), ""
    except NoCompilerError as exc:
        return reference_decode, f"decode attention in torch, which is slower: {exc}"


def _largest(converted: Converted) -> int:
    return max(b.shape[0] * b.shape[1] for b in converted.blocks)


def _read_resident(converted: Converted, chosen: frozenset[int]) -> dict[int, torch.Tensor]:
    """Stored bytes of the blocks that stay in memory."""
    found = {}
    for i in sorted(chosen):
        block = converted.blocks[i]
        with (converted.folder / block.file).open("rb", buffering=0) as file:
            file.seek(block.offset)
            data = bytearray(block.nbytes)
            if file.readinto(data) != block.nbytes:
                raise HarnessError(f"{converted.folder / block.file} was cut; remove its folder")
            found[i] = torch.frombuffer(data, dtype=torch.uint8)
    return found


def _balance(model: LocalModel, on_disk: int, stream: BlockStream, flops: float) -> int:
    """Rows at which a pass computes as long as the weights on disk take to read."""
    if not on_disk:
        return 1
    return int(on_disk / stream.measure() * flops / model.shape.flops(1, 0, 0))
