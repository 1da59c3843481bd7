"""AirLLM: holds one layer in memory at a time and reads the next one while it runs.

AirLLM (4.0.0) splits the checkpoint into one file a layer, by default beside the checkpoint; we point it to the job's
scratch folder. Transformers' `generate` then runs with hooks that read a layer, run it and free it. The KV cache stays
in memory. AirLLM has no placement: it leaves memory beyond two layers unused. It loads a tokenizer with the weights;
the harness passes token ids, so we replace that step with one that returns none. It would run code that comes with a
model: such a model is refused.
"""

from typing import Any

import airllm
import torch
from airllm.airllm_base import AirLLMBaseModel

from engines.adapters import refusals
from engines.adapters.causal_lm import CausalLMEngine, PlacedModule, PlacementRequest
from engines.common.work_memory import require_memory
from engines.models.checkpoints import evict
from harness.api import Capabilities


class AirLlmEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size and policy.compute_dtype. Takes no options."""

    name = "airllm"
    _streamed: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors", "accelerate", "airllm"))

    def _place(self, request: PlacementRequest) -> PlacedModule:
        shape, scratch = request.model.shape, request.job.scratch
        refusals.airllm(request.policy, request.limits, request.model)
        needed = max(shape.params_per_layer, shape.vocab * shape.hidden) * request.dtype_bytes
        needed += sum(request.working_bytes)
        require_memory(self.name, needed, request.limits.host_memory, "its largest layer and its working memory")
        AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None
        self._streamed = airllm.AutoModel.from_pretrained(
            request.model.path,
            device="cpu" if request.device_budget is None else "cuda:0",
            dtype=getattr(torch, request.dtype),
            layer_shards_saving_path=str(scratch),
        )
        evict(scratch)  # AirLLM has just written the layers' files there
        notes = ("streamed layer by layer from one file a layer",)
        return PlacedModule(self._streamed.model, (0, 0, request.weight_bytes), notes)

    def close(self) -> None:
        super().close()
        if self._streamed is not None and self._streamed._executor is not None:
            self._streamed._executor.shutdown(cancel_futures=True)
        self._streamed = None
