"""The baseline without weight offloading: transformers, with its own KV cache implementations."""

import importlib.util
from typing import Any

from engines.adapters.causal_lm import CausalLMEngine, Placement, from_checkpoint
from engines.common.cuda_device import device_budget
from engines.common.work_memory import require_memory
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    HarnessError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    UnsupportedError,
)

#: The least memory that a pass needs beside the weights: activations and KV cache of one short sequence, allocator
#: slack. Bytes.
WORK_BYTES = 32 << 20


class TransformersEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size, policy.compute_dtype and policy.kv_bits.

    Below 16 bits HQQ quantizes keys and values in groups of group_size; transformers keeps up to 128 of the newest
    tokens unquantized. With limits.device_memory the model runs on that device, and `offload_cache` then keeps keys and
    values of all layers but the running one in host memory.
    """

    name = "transformers"
    honours = ("gpu_batch_size", "compute_dtype", "kv_bits", "group_size")

    def __init__(self, *, offload_cache: bool = False) -> None:
        self._offload_cache = offload_cache
        self._cache: dict[str, Any] = {"cache_implementation": "offloaded"} if offload_cache else {}

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        if self._offload_cache and limits.device_memory is None:
            raise UnsupportedError("offload_cache moves the KV cache off a device: it needs limits.device_memory")
        if policy.kv_bits == 3:
            raise UnsupportedError("policy.kv_bits is 3: transformers quantizes its KV cache to 8 or 4 bits")
        if policy.kv_bits != 16:
            if self._offload_cache:
                raise UnsupportedError("transformers cannot offload a quantized KV cache: set offload_cache or kv_bits")
            if importlib.util.find_spec("hqq") is None:
                raise HarnessError("policy.kv_bits: transformers quantizes its KV cache with hqq: pip install hqq")
            config = {"backend": "hqq", "nbits": policy.kv_bits, "q_group_size": policy.group_size,
                      "axis_key": 1, "axis_value": 1}  # fmt: skip
            self._cache = {"cache_implementation": "quantized", "cache_config": config}
        return super().load(model, policy, limits, job)

    def _generate_options(self) -> dict[str, Any]:
        return self._cache

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors"))

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        weights = model.shape.params_total * DTYPE_BYTES[dtype]
        device = device_budget(limits)
        budget = limits.host_memory if device is None else device
        require_memory(self.name, weights + WORK_BYTES, budget, f"all weights in {dtype} and its working memory")
        if device is not None:
            return Placement(from_checkpoint(model, dtype).to("cuda"), (weights, 0, 0), device="cuda")
        return resident(model, dtype)


def resident(model: LocalModel, dtype: Dtype) -> Placement:
    """Loads all weights into host memory."""
    return Placement(from_checkpoint(model, dtype), (0, model.shape.params_total * DTYPE_BYTES[dtype], 0))
