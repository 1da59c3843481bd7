"""The baseline without offloading: transformers with every weight resident in host memory."""

from __future__ import annotations

from engines.causal_lm import CausalLMEngine, Placement, from_checkpoint
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    InfeasibleError,
    Job,
    LocalModel,
    OffloadPolicy,
)

#: The least a pass needs beside the weights: activations and KV cache of one short sequence, allocator slack.
WORK_BYTES = 32 << 20


class TransformersEngine(CausalLMEngine):
    """Takes no options. Honours policy.gpu_batch_size and policy.compute_dtype."""

    name = "transformers"

    def capabilities(self) -> Capabilities:
        return Capabilities(packages=("torch", "transformers", "safetensors"))

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        weights = model.shape.params_total * DTYPE_BYTES[dtype]
        budget = limits.host_memory
        if budget is not None and weights + WORK_BYTES > budget:
            raise InfeasibleError(
                f"transformers needs at least {(weights + WORK_BYTES) / 2**20:.1f} MiB for all weights in {dtype} and "
                f"to work; the budget is {budget / 2**20:.1f} MiB"
            )
        return resident(model, dtype)


def resident(model: LocalModel, dtype: Dtype) -> Placement:
    """All weights in host memory."""
    return Placement(from_checkpoint(model, dtype), (0, model.shape.params_total * DTYPE_BYTES[dtype], 0))
