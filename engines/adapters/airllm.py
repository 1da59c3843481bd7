"""AirLLM: holds one layer in memory at a time and reads the next one while it runs.

AirLLM (4.0.0) splits the checkpoint into one file a layer, by default beside the checkpoint; we point it to the job's
scratch folder. Transformers' `generate` then runs with hooks that read a layer, run it and free it. The KV cache stays
in memory. AirLLM has no placement: it leaves memory beyond two layers unused. It loads a tokenizer with the weights;
the harness passes token ids, so we replace that step with one that returns none.
"""

from typing import Any

import airllm
import torch
from airllm.airllm_base import AirLLMBaseModel

from engines.adapters.causal_lm import CausalLMEngine, Placement
from engines.common.cuda_device import device_budget
from engines.common.work_memory import require_memory, working_bytes
from engines.models.checkpoints import evict
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    Job,
    LocalModel,
    OffloadPolicy,
    UnsupportedError,
)

#: Architectures whose modules have the names that AirLLM looks for.
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


class AirLlmEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size and policy.compute_dtype. Takes no options."""

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
        device = "cpu" if device_budget(limits) is None else "cuda:0"
        dtype_bytes = DTYPE_BYTES[dtype]
        layer = max(shape.params_per_layer, shape.vocab * shape.hidden) * dtype_bytes
        work = sum(working_bytes(shape, policy.gpu_batch_size, job.max_sequence, dtype_bytes))
        require_memory(self.name, layer + work, limits.host_memory, "its largest layer and its working memory")
        AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None
        self._streamed = airllm.AutoModel.from_pretrained(
            model.path,
            device=device,
            dtype=getattr(torch, dtype),
            layer_shards_saving_path=str(job.scratch),
        )
        evict(job.scratch)  # AirLLM has just written the layers' files there
        total = shape.params_total * dtype_bytes
        return Placement(
            self._streamed.model, (0, 0, total), ("streamed layer by layer from one file a layer",), device
        )

    def close(self) -> None:
        super().close()
        if self._streamed is not None and self._streamed._executor is not None:
            self._streamed._executor.shutdown(cancel_futures=True)
        self._streamed = None
