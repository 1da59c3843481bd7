"""vLLM with weights that do not fit the device kept in RAM, and a tier of RAM for keys and values.

vLLM needs a CUDA device and is configured as its documentation does for models that are too large for it:

- `cpu_offload_gb` for what the device cannot hold beside one block of requests: vLLM reads those weights over the bus
  in every pass;
- an offloading connector with the rest of the host's budget, where keys and values of preempted requests go;
- prefix caching off, so that a prompt that was seen before is computed again, as by every other engine.

The engine is stepped by hand, so that every token has the time at which vLLM gave it out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from engines.common import requests as checks
from engines.common.cuda_device import cuda
from engines.common.work_memory import working_bytes
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    InfeasibleError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    Score,
    UnsupportedError,
)

#: Of the device's memory vLLM plans with less than all: graphs and the allocator take the rest.
_PLANNED = 0.9


class VllmEngine:
    """Honours policy.gpu_batch_size (the most sequences at once) and policy.compute_dtype.

    `cpu_offload` (bytes) sets how much of the weights stays in RAM; left out, what does not fit. `kv_tier` (bytes) is
    the room for keys and values there; left out, what host memory's limit leaves, or none without a limit.
    """

    name = "vllm"
    _llm: Any = None

    def __init__(self, *, cpu_offload: int | None = None, kv_tier: int | None = None) -> None:
        self._cpu_offload, self._kv_tier = cpu_offload, kv_tier

    def capabilities(self) -> Capabilities:
        return Capabilities(phased=False, device=True, packages=("torch", "transformers", "vllm"))

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        policy.require_defaults_except(self.name, "gpu_batch_size", "compute_dtype")
        if limits.threads is not None or limits.disk_bandwidth is not None:
            raise UnsupportedError("engine vllm has no limits.threads or limits.disk_bandwidth")
        if cuda(limits) is None or limits.device_memory is None:
            raise UnsupportedError("vLLM's offloading is from a CUDA device: it needs limits.device_memory")
        shape, batch = model.shape, policy.gpu_batch_size
        dtype = model.dtype if policy.compute_dtype == "auto" else policy.compute_dtype
        weights = shape.params_total * DTYPE_BYTES[dtype]
        whole = torch.cuda.get_device_properties(0).total_memory
        device = min(whole, limits.device_memory)
        cache, work = working_bytes(shape, batch, job.max_sequence, DTYPE_BYTES[dtype])
        room = int(device * _PLANNED) - cache - work
        offload = max(0, weights - room) if self._cpu_offload is None else self._cpu_offload
        if offload > weights or (limits.host_memory is not None and offload > limits.host_memory):
            raise InfeasibleError(
                f"vllm keeps at most its weights in RAM: {offload / 2**30:.1f} GiB of {weights / 2**30:.1f} GiB would "
                "have to be there; ask for a smaller batch"
            )
        spare = 0 if limits.host_memory is None else max(0, limits.host_memory - offload)
        tier = spare if self._kv_tier is None else self._kv_tier
        extra = {"kv_offloading_size": tier / 2**30, "kv_offloading_backend": "native"} if tier else {}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the probes are of this process
        self._llm = vllm.LLM(
            model=model.path,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=min(shape.max_context, max(job.max_sequence, 16)),
            gpu_memory_utilization=_PLANNED * device / whole,
            cpu_offload_gb=offload / 2**30,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **extra,
        )
        self._model = model
        return LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=dtype,
            weights_by_tier=(weights - offload, offload, 0),
            notes=(f"cpu_offload_gb {offload / 2**30:.2f}, room for keys and values in RAM {tier / 2**30:.2f} GiB",),
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """All requests in vLLM's own queue. Raises before any work for what it cannot run."""
        for request in requests:
            checks.validate(request, self._model.shape)
            if request.sampling.stop or request.sampling.logprobs is not None:
                raise UnsupportedError(
                    f"request {request.id}: vLLM is asked in tokens here: no stop strings or logprobs"
                )
        return self._stepped(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _stepped(self, pending: list[GenerationRequest], began: float) -> Iterator[GenerationResult]:
        engine = self._llm.llm_engine
        open_: dict[str, tuple[GenerationRequest, float, list[int], list[float]]] = {}
        while pending or open_:
            now = time.perf_counter() - began
            while pending and pending[0].arrival_s <= now:
                request = pending.pop(0)
                engine.add_request(request.id, {"prompt_token_ids": list(request.prompt)}, _sampling(request))
                open_[request.id] = (request, now, [], [])
            if not open_:
                time.sleep(pending[0].arrival_s - now)
                continue
            for output in engine.step():
                request, start, tokens, times = open_[output.request_id]
                found = output.outputs[0]
                tokens += found.token_ids
                times += [time.perf_counter() - began] * len(found.token_ids)
                if output.finished:
                    del open_[request.id]
                    yield GenerationResult(
                        id=request.id,
                        tokens=tuple(tokens),
                        start_s=start,
                        token_times_s=tuple(times),
                        prompt_tokens=len(request.prompt),
                        finish_reason="stop" if found.finish_reason == "stop" else "length",
                    )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """By vLLM's log-probabilities of prompts. An empty context becomes the token that begins a sequence, or ends
        it. Raises HarnessError for a pair that cannot be scored."""
        config = self._llm.llm_engine.model_config.hf_config
        begin = checks.special_tokens(config, self._model.shape.vocab)[1]
        full = [checks.full_sequence(i, *pair, self._model.shape, begin) for i, pair in enumerate(pairs)]
        params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in full], params, use_tqdm=False)
        scores = []
        for ids, (_, continuation), output in zip(full, pairs, outputs, strict=True):
            last = range(len(ids) - len(continuation), len(ids))
            found = [output.prompt_logprobs[i][ids[i]] for i in last]
            scores.append(Score(sum(f.logprob for f in found), all(f.rank == 1 for f in found)))
        return scores

    def trace(self) -> EngineTrace:
        return EngineTrace()

    def close(self) -> None:
        self._llm = None


def _sampling(request: GenerationRequest) -> Any:
    asked = request.sampling
    return vllm.SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k or -1,
        min_p=asked.min_p,
        seed=asked.seed,
        ignore_eos=asked.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
