"""The offload engine behind the Engine protocol: load, generate, score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from engines.common import requests as checks
from engines.offload.device.cuda import opened
from engines.offload.device.protocol import Device
from engines.offload.loader import Loading
from engines.offload.loader_device import DeviceLoading
from engines.offload.memory.plan import MemoryPlan
from engines.offload.model.meta_model import MetaModel
from engines.offload.model_runner import Runtime
from engines.offload.sequence import Generation, Scoring
from harness.api import (
    Capabilities,
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
             "compute_dtype", "weight_bits", "kv_bits", "group_size", "weight_groups", "value_sparsity", "overlap",
             "nano_batches", "nano_overlap", "threads", "cpu_attention")  # fmt: skip


@dataclass(frozen=True)
class _Loaded:
    """A model that is ready."""

    model: LocalModel
    meta_model: MetaModel
    runtime: Runtime
    plan: MemoryPlan
    device: Device | None


class OffloadEngine:
    """Any decoder that the seams carry, its weights streamed from disk in `row`, `zigzag` or `sweep` order."""

    def __init__(self, *, attention_units: int | None = None) -> None:
        if attention_units is not None and attention_units < 1:
            raise TypeError("attention_units must be at least 1")
        self._attention_units = attention_units
        self._now: _Loaded | None = None
        self._parts = ExitStack()  # what `close` must end

    def capabilities(self) -> Capabilities:
        return Capabilities(
            phased=False,
            device=True,
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
        for field, schedule in (("num_gpu_batches", "zigzag"), ("nano_batches", "sweep")):
            if getattr(policy, field) > 1 and policy.schedule != schedule:
                raise UnsupportedError(f"policy.{field} is for {schedule}; a {policy.schedule} pass has one batch")
        with ExitStack() as parts:  # where something fails, it ends what was begun
            if asked := [count for count in (policy.threads, limits.threads) if count is not None]:
                parts.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(min(asked))
            device = opened(limits, self._attention_units)
            if self._attention_units is not None and device is None:
                raise UnsupportedError(
                    "options.attention_units: there is no device to part without limits.device_memory"
                )
            if device is not None:
                parts.callback(device.close)
            if policy.cpu_attention and device is None:
                raise UnsupportedError(
                    "policy.cpu_attention: without a device all attention is the host's: leave it out"
                )
            loading = (
                Loading(model, policy, limits, job) if device is None
                else DeviceLoading(model, policy, limits, job, device)
            )  # fmt: skip
            # a circle, which would keep what is resident until it is collected
            parts.callback(setattr, loading.meta_model, "weights", None)
            runtime = loading.start(parts)
            self._now = _Loaded(model, loading.meta_model, runtime, loading.plan, device)
            self._parts = parts.pop_all()
        return loading.report()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        now = self._loaded()
        for request in requests:
            checks.validate(request, now.model.shape)
            tokens = len(request.prompt) + request.sampling.max_tokens - 1
            now.runtime.require_blocks(f"request {request.id}", tokens)
        decode = checks.decoder(now.model.path) if any(r.sampling.stop for r in requests) else None
        active = [Generation(r, now.meta_model.eos, decode) for r in requests]
        return (sequence.result() for sequence in now.runtime.run(active))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores from the logits of the continuation's positions only; an empty context becomes the token that
        begins a sequence, or else the one that ends it."""
        now = self._loaded()
        active = []
        for i, (context, continuation) in enumerate(pairs):
            full = checks.full_sequence(i, context, continuation, now.model.shape, now.meta_model.begin)
            now.runtime.require_blocks(f"pair {i}", len(full) - 1)
            active.append(Scoring(i, full, len(continuation)))
        if not active:
            return []
        share = sum(len(continuation) for _, continuation in pairs) / sum(len(one.tokens) for one in active)
        done = {
            sequence.index: sequence.result() for sequence in now.runtime.run(active, *now.plan.chunk_limits(share))
        }
        return [done[i] for i in range(len(pairs))]

    def trace(self) -> EngineTrace:
        now = self._loaded()
        found = now.runtime.timeline.trace()
        return found if now.device is None else replace(found, metrics={**found.metrics, **now.device.memory()})

    def close(self) -> None:
        self._now = None  # what it holds must be gone when the device gives memory back
        self._parts.close()

    def _loaded(self) -> _Loaded:
        if self._now is None:
            raise HarnessError("engine offload has no model loaded")
        return self._now
