"""The offload engine behind the Engine protocol: load, generate, score."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from engines.common.requests import decoder, full_sequence
from engines.offload.backend.base import Backend, LoadRequest
from engines.offload.backend.cuda import CudaBackend
from engines.offload.backend.host import HostBackend
from engines.offload.device.cuda import opened
from engines.offload.device.host import HostDevice
from engines.offload.kernels import HostKernels
from engines.offload.loaded_model import EngineStats, LoadedModel
from engines.offload.loader import load
from engines.offload.model_runner import ModelRunner
from engines.offload.sequence import Generation, Scoring
from harness import api


class OffloadEngine:
    """Any transformers decoder, its weights streamed from disk or host memory in `row`, `zigzag` or `sweep` order.
    Honours every field of the policy.

    `attention_units`: multiprocessors of a CUDA device that attention beside products is held to.
    """

    def __init__(self, *, attention_units: int | None = None) -> None:
        if attention_units is not None and attention_units < 1:
            raise TypeError("attention_units must be at least 1")
        self._attention_units = attention_units
        self._runner: ModelRunner | None = None
        self._host_kernels: HostKernels | None = None
        self._resources = ExitStack()  # what `close` must end

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(
            phased=False,
            device=True,
            packages=("torch", "transformers", "safetensors", "accelerate", "greenlet", "numpy"),
            batch_policy=api.OffloadPolicy(schedule="sweep", gpu_batch_size=256),
        )

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        """Plans the memory, converts the checkpoint on first use, starts the stream.

        Raises UnsupportedError for models and policies it cannot run and InfeasibleError for too small a budget,
        both before weights are read or written.
        """
        self.close()
        for field, schedule in (("num_gpu_batches", "zigzag"), ("nano_batches", "sweep")):
            if getattr(policy, field) > 1 and policy.schedule != schedule:
                raise api.UnsupportedError(f"policy.{field} is for {schedule}; a {policy.schedule} pass has one batch")
        request = LoadRequest(model, policy, limits, job)
        with ExitStack() as resources:  # a load that fails ends what it has started
            resources.callback(torch.set_num_threads, torch.get_num_threads())
            if threads := [count for count in (policy.threads, limits.threads) if count is not None]:
                torch.set_num_threads(min(threads))
            host_kernels = HostKernels(job.cache, torch.get_num_threads())
            resources.callback(host_kernels.close)
            backend = self._backend(request, host_kernels, resources)
            self._runner = ModelRunner(load(request, backend, host_kernels, resources))
            self._resources, self._host_kernels = resources.pop_all(), host_kernels
        return self.loaded.report

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        runner = self._loaded_runner()
        model = runner.loaded.model
        for request in requests:
            request.require_valid(model.shape)
            runner.require_blocks(f"request {request.id}", len(request.prompt) + request.sampling.max_tokens - 1)
        decode = decoder(model.path, requests)
        sequences = [Generation(r, runner.loaded.meta_model.eos, decode) for r in requests]
        return (sequence.result() for sequence in runner.run(sequences))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        """Scores from the logits of the continuation's positions only; an empty context becomes the token that
        begins a sequence, or else the one that ends it."""
        runner = self._loaded_runner()
        loaded = runner.loaded
        sequences = []
        for i, (context, continuation) in enumerate(pairs):
            full = full_sequence(i, context, continuation, loaded.model.shape, loaded.meta_model.bos)
            runner.require_blocks(f"pair {i}", len(full) - 1)
            sequences.append(Scoring(i, full, len(continuation)))
        if not sequences:
            return []
        continued = sum(len(continuation) for _, continuation in pairs) / sum(len(s.tokens) for s in sequences)
        done = runner.run(sequences, *loaded.plan.chunk_limits(continued))
        scores = {sequence.index: sequence.result() for sequence in done}
        return [scores[i] for i in range(len(pairs))]

    def trace(self) -> api.EngineTrace:
        trace = self.loaded.timeline.trace()
        return replace(trace, metrics={**trace.metrics, **self.loaded.device.memory()})

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model: its plan, tiles, cache and timeline. Raises HarnessError if nothing is loaded."""
        return self._loaded_runner().loaded

    def stats(self) -> EngineStats:
        """Counts and bytes of what is loaded and was moved. Raises HarnessError if nothing is loaded."""
        return self.loaded.stats()

    def close(self) -> None:
        if self._host_kernels is not None:
            self._host_kernels.close()  # before any weight goes: a late thread of the pool may still read one
        self._runner = None  # its tensors must be gone when the device returns memory
        self._resources.close()

    def _backend(self, request: LoadRequest, host_kernels: HostKernels, resources: ExitStack) -> Backend:
        accelerator = opened(request.limits, self._attention_units)
        if accelerator is not None:
            resources.callback(accelerator.close)
            return CudaBackend(request, host_kernels, accelerator)
        if self._attention_units is not None:
            raise api.UnsupportedError(
                "options.attention_units: there is no device to part without limits.device_memory"
            )
        if request.policy.cpu_attention:
            raise api.UnsupportedError(
                "policy.cpu_attention: without a device all attention is the host's: leave it out"
            )
        host = HostDevice()
        resources.callback(host.close)
        return HostBackend(request, host_kernels, host)

    def _loaded_runner(self) -> ModelRunner:
        if self._runner is None:
            raise api.HarnessError("engine offload has no model loaded")
        return self._runner
