"""AirLLM: one layer in memory at a time, the next one read while it runs.

AirLLM (4.0.0) splits the checkpoint into a file for each layer, here in the job's scratch folder and not beside the
checkpoint, where it would by itself; then transformers' own `generate` runs with hooks that read a layer, run it and
free it. It keeps the KV cache in memory and has no placement: what is free beyond a layer and its successor is not used
for weights. It wants a tokenizer beside the weights; the harness speaks in tokens, so it is given none.
"""

from __future__ import annotations

from typing import Any

import airllm
import torch
from airllm.airllm_base import AirLLMBaseModel

from engines.adapters.causal_lm import CausalLMEngine, Placement
from engines.common.cuda_device import cuda
from engines.common.work_memory import working_bytes
from engines.models.checkpoints import evict
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    InfeasibleError,
    Job,
    LocalModel,
    OffloadPolicy,
    UnsupportedError,
)

#: Architectures whose modules AirLLM finds by the names it looks for.
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


class AirLlmEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size and policy.compute_dtype. Without options: AirLLM has nothing to set here."""

    name = "airllm"
    _streamed: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors", "accelerate", "airllm"))

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        shape = model.shape
        if shape.family not in _FAMILIES:
            raise UnsupportedError(f"engine airllm runs {', '.join(_FAMILIES)}, not {shape.family}")
        device = "cpu" if cuda(limits) is None else "cuda:0"
        width = DTYPE_BYTES[dtype]
        layer = max(shape.params_per_layer, shape.vocab * shape.hidden) * width
        work = sum(working_bytes(shape, policy.gpu_batch_size, job.max_sequence, width))
        if limits.host_memory is not None and layer + work > limits.host_memory:
            raise InfeasibleError(
                f"airllm needs at least {(layer + work) / 2**20:.1f} MiB for its largest layer and to work; the budget "
                f"is {limits.host_memory / 2**20:.1f} MiB"
            )
        AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None
        self._streamed = airllm.AutoModel.from_pretrained(
            model.path,
            device=device,
            dtype=getattr(torch, dtype),
            layer_shards_saving_path=str(job.scratch),
        )
        evict(job.scratch)  # the layers' files, just written
        total = shape.params_total * width
        return Placement(self._streamed.model, (0, 0, total), ("a layer at a time from files of its own",), device)

    def close(self) -> None:
        super().close()
        if self._streamed is not None and self._streamed._executor is not None:
            self._streamed._executor.shutdown(cancel_futures=True)
        self._streamed = None
