"""vLLM with the weights that do not fit the device in host memory, and a host memory tier for the KV cache.

vLLM needs a CUDA device. It is configured as its documentation recommends for models that do not fit the device:

- `cpu_offload_gb` for the weights that the device cannot hold beside one batch: vLLM reads them over the bus in every
  pass;
- an offloading connector with the rest of the host budget, for the KV cache of preempted requests;
- prefix caching off, so that vLLM computes a repeated prompt again, as every other engine does.

We call the engine's `step` ourselves, so that every token has the time at which vLLM returned it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from engines.adapters import refusals
from engines.common.cuda_device import device_budget
from engines.common.requests import full_sequence, special_tokens
from engines.common.work_memory import working_bytes
from harness import api

#: The fraction of device memory that vLLM plans with; CUDA graphs and the allocator take the rest.
_UTILIZATION = 0.9


class VllmEngine(api.Engine):
    """Honours policy.gpu_batch_size (the most concurrent sequences) and policy.compute_dtype.

    `cpu_offload`: bytes of weights in host memory; by default those that do not fit the device. `kv_tier`: bytes of
    host memory for the KV cache; by default the rest of the host memory limit, or none without a limit.
    """

    name = "vllm"
    _llm: Any = None

    def __init__(self, *, cpu_offload: int | None = None, kv_tier: int | None = None) -> None:
        self._cpu_offload, self._kv_tier = cpu_offload, kv_tier

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(phased=False, device=True, packages=("torch", "transformers", "vllm"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        refusals.vllm(policy, limits, model)
        device_budget(limits)  # raises where there is no such device
        assert limits.device_memory is not None
        shape, batch = model.shape, policy.gpu_batch_size
        dtype = policy.float_dtype(self.name, model.dtype)
        weights = shape.params_total * api.DTYPE_BYTES[dtype]
        whole = torch.cuda.get_device_properties(0).total_memory
        device = min(whole, limits.device_memory)
        cache, work = working_bytes(shape, batch, job.max_sequence, api.DTYPE_BYTES[dtype])
        weight_room = int(device * _UTILIZATION) - cache - work
        offload = max(0, weights - weight_room) if self._cpu_offload is None else self._cpu_offload
        if offload > weights or (limits.host_memory is not None and offload > limits.host_memory):
            raise api.InfeasibleError(
                f"vllm would need {offload / 2**30:.1f} GiB of host memory for weights, of {weights / 2**30:.1f} GiB "
                "in all: more than its weights or than limits.host_memory; use a smaller batch"
            )
        spare = 0 if limits.host_memory is None else max(0, limits.host_memory - offload)
        kv_tier = spare if self._kv_tier is None else self._kv_tier
        extra = {"kv_offloading_size": kv_tier / 2**30, "kv_offloading_backend": "native"} if kv_tier else {}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the probes watch this process
        self._llm = vllm.LLM(
            model=model.path,
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=min(shape.max_context, max(job.max_sequence, 16)),
            gpu_memory_utilization=_UTILIZATION * device / whole,
            cpu_offload_gb=offload / 2**30,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **extra,
        )
        self._model = model
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=dtype,
            weights_by_tier=(weights - offload, offload, 0),
            notes=(f"cpu_offload_gb {offload / 2**30:.2f}, host memory for the KV cache {kv_tier / 2**30:.2f} GiB",),
        )

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Queues all requests in vLLM as they arrive. Raises HarnessError before any work for one that cannot run."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "stop", "logprobs", "json_schema")
        return self._step_until_done(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _step_until_done(self, pending: list[api.GenerationRequest], began: float) -> Iterator[api.GenerationResult]:
        engine = self._llm.llm_engine
        running: dict[str, tuple[api.GenerationRequest, float, list[int], list[float]]] = {}
        while pending or running:
            now = time.perf_counter() - began
            while pending and pending[0].arrival_s <= now:
                request = pending.pop(0)
                engine.add_request(request.id, {"prompt_token_ids": list(request.prompt)}, _sampling(request))
                running[request.id] = (request, now, [], [])
            if not running:
                time.sleep(pending[0].arrival_s - now)
                continue
            for output in engine.step():
                request, start, tokens, times = running[output.request_id]
                completion = output.outputs[0]
                tokens += completion.token_ids
                times += [time.perf_counter() - began] * len(completion.token_ids)
                if output.finished:
                    del running[request.id]
                    yield api.GenerationResult(
                        id=request.id,
                        tokens=tuple(tokens),
                        start_s=start,
                        token_times_s=tuple(times),
                        prompt_tokens=len(request.prompt),
                        finish_reason="stop" if completion.finish_reason == "stop" else "length",
                    )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        """Scores with vLLM's prompt log-probabilities. An empty context becomes the beginning-of-sequence token, or
        else the end-of-sequence token. Raises HarnessError for a pair that cannot be scored."""
        config = self._llm.llm_engine.model_config.hf_config
        begin = special_tokens(config, self._model.shape.vocab)[1]
        full = [full_sequence(i, *pair, self._model.shape, begin) for i, pair in enumerate(pairs)]
        params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in full], params, use_tqdm=False)
        scores = []
        for ids, (_, continuation), output in zip(full, pairs, outputs, strict=True):
            positions = range(len(ids) - len(continuation), len(ids))
            logprobs = [output.prompt_logprobs[i][ids[i]] for i in positions]
            scores.append(api.Score(sum(p.logprob for p in logprobs), all(p.rank == 1 for p in logprobs)))
        return scores

    def close(self) -> None:
        self._llm = None


def _sampling(request: api.GenerationRequest) -> Any:
    sampling = request.sampling
    return vllm.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        min_p=sampling.min_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
