"""The baseline without weight offloading: transformers, with its own KV cache implementations."""

import importlib.util

from engines.adapters.causal_lm import CausalLMEngine, PlacedModule, PlacementRequest, from_checkpoint
from engines.common.work_memory import require_memory
from harness.api import Capabilities, HarnessError, OffloadPolicy, UnsupportedError
from harness.common.packages import install

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
        self._generate_options = {"cache_implementation": "offloaded"} if offload_cache else {}

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors"))

    def _place(self, request: PlacementRequest) -> PlacedModule:
        if self._offload_cache and request.device_budget is None:
            raise UnsupportedError("offload_cache moves the KV cache off a device: it needs limits.device_memory")
        if request.policy.kv_bits != 16:
            self._quantize_cache(request.policy)
        on_host = request.device_budget is None
        budget = request.limits.host_memory if on_host else request.device_budget
        purpose = f"all weights in {request.dtype} and its working memory"
        require_memory(self.name, request.weight_bytes + WORK_BYTES, budget, purpose)
        if on_host:
            return resident(request)
        return PlacedModule(from_checkpoint(request).to("cuda"), (request.weight_bytes, 0, 0))

    def _quantize_cache(self, policy: OffloadPolicy) -> None:
        if policy.kv_bits == 3:
            raise UnsupportedError("policy.kv_bits is 3: transformers quantizes its KV cache to 8 or 4 bits")
        if self._offload_cache:
            raise UnsupportedError("transformers cannot offload a quantized KV cache: set offload_cache or kv_bits")
        if importlib.util.find_spec("hqq") is None:
            raise HarnessError(f"policy.kv_bits: transformers quantizes its KV cache with hqq: {install('hqq')}")
        config = {"backend": "hqq", "nbits": policy.kv_bits, "q_group_size": policy.group_size,
                  "axis_key": 1, "axis_value": 1}  # fmt: skip
        self._generate_options = {"cache_implementation": "quantized", "cache_config": config}


def resident(request: PlacementRequest) -> PlacedModule:
    """Loads all weights into host memory."""
    return PlacedModule(from_checkpoint(request), (0, request.weight_bytes, 0))
