"""OpenVINO GenAI's continuous batching on a CPU: weights and KV cache resident, as a reference.

OpenVINO reads its own format, so optimum-intel exports the checkpoint once into the cache, in the stored dtype or,
with weight_bits 8, in int8 with a scale for each row, as its documentation recommends. Its CPU plug-in would keep keys
and values in 8 bits by default; here policy.kv_bits says it. Prefix caching is off, as in every engine. With int8
weights it quantizes activations on the fly, which is its own default.

We call the pipeline's `step` ourselves, so that every token has the time at which OpenVINO returned it.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from engines.adapters import refusals
from engines.common.folders import build_once
from engines.common.requests import generation_settings, special_tokens
from engines.common.work_memory import SLACK_BYTES, require_memory, working_bytes
from engines.models.checkpoints import content_digest, evict
from harness import api
from harness.common.system import usable_cpus

#: Tokens of a block of the KV cache on a CPU.
_BLOCK = 32
_PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVinoEngine(api.Engine):
    """Honours policy.gpu_batch_size (the most concurrent sequences), policy.compute_dtype, policy.weight_bits (16 or 8)
    and policy.kv_bits (16 or 8). Greedy only; raises UnsupportedError for scores.

    `batch_tokens`: the most tokens of a pass; OpenVINO's default is 256.
    """

    name = "openvino"
    _pipeline: Any = None

    def __init__(self, *, batch_tokens: int = 256) -> None:
        self._batch_tokens = batch_tokens

    def capabilities(self) -> api.Capabilities:
        packages = ("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers")
        return api.Capabilities(phased=False, packages=packages)

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        refusals.openvino(policy, limits, model)
        shape, batch = model.shape, policy.gpu_batch_size
        dtype = policy.float_dtype(self.name, model.dtype)
        work = sum(working_bytes(shape, batch, job.max_sequence, api.DTYPE_BYTES[dtype])) + SLACK_BYTES
        weights = model.weight_bytes if policy.weight_bits == 16 else shape.params_total * policy.weight_bits // 8
        require_memory(self.name, weights + work, limits.host_memory, "its weights and working memory")
        folder = _exported(model, policy.weight_bits, job)
        evict(folder)  # read from disk at each load, and charged to this launch
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = batch
        scheduler.max_num_batched_tokens = max(batch, self._batch_tokens)
        scheduler.num_kv_blocks = batch * (-(-job.max_sequence // _BLOCK) + 1)
        scheduler.enable_prefix_caching = False
        threads = limits.threads or usable_cpus()
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
            "KV_CACHE_PRECISION": "u8" if policy.kv_bits == 8 else _PRECISION[dtype],
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings)
        self._model, self._count = model, 0
        self._eos = special_tokens(generation_settings(model.path), shape.vocab)[0]
        stored = (folder / "openvino_model.bin").stat().st_size
        words = ", ".join(f"{key} {value}" for key, value in settings.items())
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=dtype,
            weights_by_tier=(0, stored, 0),
            notes=(f"{words}, {scheduler.max_num_batched_tokens} tokens a pass",),
        )

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work, then queues them as they arrive."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "temperature", "stop", "min_tokens", "logprobs", "json_schema")
        return self._step_until_done(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _step_until_done(self, pending: list[api.GenerationRequest], began: float) -> Iterator[api.GenerationResult]:
        running: list[tuple[api.GenerationRequest, Any, float, list[int], list[float]]] = []
        while pending or running:
            now = time.perf_counter() - began
            while pending and pending[0].arrival_s <= now:
                request = pending.pop(0)
                running.append((request, self._add(request), now, [], []))
            if not running:
                time.sleep(pending[0].arrival_s - now)
                continue
            self._pipeline.step()
            now = time.perf_counter() - began
            for entry in [*running]:
                request, handle, start, tokens, times = entry
                while handle.can_read():
                    (output,) = handle.read().values()
                    tokens += output.generated_ids
                    times += [now] * len(output.generated_ids)
                if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                    continue
                running.remove(entry)
                yield api.GenerationResult(
                    id=request.id,
                    tokens=tuple(tokens),
                    start_s=start,
                    token_times_s=tuple(times),
                    prompt_tokens=len(request.prompt),
                    finish_reason="length" if len(tokens) == request.sampling.max_tokens else "stop",
                )

    def _add(self, request: api.GenerationRequest) -> Any:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = request.sampling.max_tokens
        settings.do_sample = False
        settings.ignore_eos = request.sampling.ignore_eos
        if not request.sampling.ignore_eos:
            settings.stop_token_ids = set(self._eos)
        self._count += 1
        return self._pipeline.add_request(self._count, openvino.Tensor(np.array([request.prompt])), settings)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        raise api.UnsupportedError("OpenVINO GenAI returns no log-likelihoods of a given continuation: it cannot score")

    def close(self) -> None:
        self._pipeline = None


def _exported(model: api.LocalModel, bits: int, job: api.Job) -> Path:
    """The checkpoint in OpenVINO's format, with weights of `bits`, written once into `job.cache`."""

    def write(temporary: Path) -> None:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # for this step only

        # without `load_in_8bit: False` a large model would become int8 unasked
        how = {"quantization_config": OVWeightQuantizationConfig(bits=8)} if bits == 8 else {"load_in_8bit": False}
        source = {"export": True, "compile": False, "local_files_only": True}
        exported = OVModelForCausalLM.from_pretrained(model.path, trust_remote_code=False, **source, **how)
        exported.save_pretrained(temporary)

    folder = job.cache / "openvino" / f"{content_digest(model, job.cache, job.on_progress)}-{bits}"
    return build_once(folder, "the weights in OpenVINO's format", model.weight_bytes, write)
