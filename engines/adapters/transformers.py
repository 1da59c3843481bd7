"""The baseline without offloading of weights: transformers, with the caches of keys and values that it has."""

from __future__ import annotations

import importlib.util
from typing import Any

from engines.adapters.causal_lm import CausalLMEngine, Placement, from_checkpoint
from engines.common.cuda_device import cuda
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    HarnessError,
    InfeasibleError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    UnsupportedError,
)

#: The least a pass needs beside the weights: activations and KV cache of one short sequence, allocator slack.
WORK_BYTES = 32 << 20


class TransformersEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size, policy.compute_dtype and policy.kv_bits.

    With fewer than 16 bits keys and values are quantized by HQQ in groups of group_size, but for up to 128 generated
    since the last time (transformers' own setting). With limits.device_memory the model is on that device, and
    `offload_cache` keeps keys and values of all layers but the running one in host memory.
    """

    name = "transformers"
    honours = ("gpu_batch_size", "compute_dtype", "kv_bits", "group_size")

    def __init__(self, *, offload_cache: bool = False) -> None:
        self._offload_cache = offload_cache
        self._cache: dict[str, Any] = {"cache_implementation": "offloaded"} if offload_cache else {}

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        if self._offload_cache and limits.device_memory is None:
            raise UnsupportedError("offload_cache moves the cache off a device: it needs limits.device_memory")
        if policy.kv_bits == 3:
            raise UnsupportedError("policy.kv_bits: transformers' cache takes 8 or 4 bits: HQQ packs no 3 here")
        if policy.kv_bits != 16:
            if self._offload_cache:
                raise UnsupportedError("a quantized cache cannot be offloaded too: choose offload_cache or kv_bits")
            if importlib.util.find_spec("hqq") is None:
                raise HarnessError("policy.kv_bits: transformers quantizes its cache by hqq: pip install hqq")
            how = {"backend": "hqq", "nbits": policy.kv_bits, "axis_key": 1, "axis_value": 1}
            settings = how | {"q_group_size": policy.group_size}
            self._cache = {"cache_implementation": "quantized", "cache_config": settings}
        return super().load(model, policy, limits, job)

    def _generate_options(self) -> dict[str, Any]:
        return self._cache

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors"))

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        weights = model.shape.params_total * DTYPE_BYTES[dtype]
        given = cuda(limits)
        budget = limits.host_memory if given is None else given
        if budget is not None and weights + WORK_BYTES > budget:
            raise InfeasibleError(
                f"transformers needs at least {(weights + WORK_BYTES) / 2**20:.1f} MiB for all weights in {dtype} and "
                f"to work; the budget is {budget / 2**20:.1f} MiB"
            )
        if given is not None:
            return Placement(from_checkpoint(model, dtype).to("cuda"), (weights, 0, 0), device="cuda")
        return resident(model, dtype)


def resident(model: LocalModel, dtype: Dtype) -> Placement:
    """All weights in host memory."""
    return Placement(from_checkpoint(model, dtype), (0, model.shape.params_total * DTYPE_BYTES[dtype], 0))
