"""oLLM: reads each layer from the checkpoint's own safetensors when the layer runs, and frees it afterwards.

oLLM (1.0.3) replaces transformers' LLaMA classes: a layer reads its weights through the page cache, without prefetch.
Embeddings and vocabulary projection stay in memory, and so do as many first layers as it is told to hold. It runs on
transformers 4 and in bfloat16 only, and its feed-forward takes one sequence at a time (`MyLlamaMLP` drops the batch
dimension). flash-attn, kvikio and cupy, which it uses beside CUDA, are absent here: attention is transformers' SDPA.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ollm
from ollm import llama

from engines.adapters import refusals
from engines.adapters.causal_lm import CausalLMEngine, PlacedModule, PlacementRequest
from engines.common.work_memory import SLACK_BYTES, require_memory
from harness import api


class OllmEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size (1 only) and policy.compute_dtype (bfloat16 only).

    `resident_layers` is how many layers stay in RAM; by default as many as the host memory limit has room for, and
    none without a limit, as in oLLM itself. `disk_cache` keeps the prompt's keys and values on disk.
    """

    name = "ollm"
    _inference: Any = None
    _cache_folder: Path

    def __init__(self, *, resident_layers: int | None = None, disk_cache: bool = False) -> None:
        if resident_layers is not None and resident_layers < 0:
            raise TypeError("resident_layers must be at least 0")
        self._resident_layers = resident_layers
        self._disk_cache = disk_cache

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(device=True, packages=("torch", "transformers", "safetensors", "accelerate", "ollm"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        report = super().load(model, policy, limits, job)
        if not self._disk_cache:
            return report
        return dataclasses.replace(report, policy=dataclasses.replace(report.policy, cache=(0.0, 0.0, 1.0)))

    def close(self) -> None:
        super().close()
        self._inference = llama.loader = None  # the loader holds the resident layers

    def _place(self, request: PlacementRequest) -> PlacedModule:
        refusals.ollm(request.policy, request.limits, request.model)
        shape = request.model.shape
        layer = shape.params_per_layer * request.dtype_bytes
        fixed = request.weight_bytes - shape.num_layers * layer
        resident = self._layers_in_memory(request, fixed, layer)
        self._cache_folder = request.job.scratch
        module = self._load(request.model.path, "cpu" if request.device_budget is None else "cuda:0")
        if resident:
            self._inference.offload_layers_to_cpu(layers_num=resident)
        on_disk = (shape.num_layers - resident) * layer
        kept = resident * layer
        by_tier = (0, fixed + kept, on_disk) if request.device_budget is None else (fixed, kept, on_disk)
        notes = [f"{resident} of {shape.num_layers} layers in RAM, the others read in every pass, without prefetch"]
        if self._disk_cache:
            notes.append("keys and values of the prompt on disk")
        return PlacedModule(module, by_tier, tuple(notes))

    def _layers_in_memory(self, request: PlacementRequest, fixed: int, layer: int) -> int:
        """How many layers stay in RAM. Raises InfeasibleError where the budgets have no room for a pass."""
        on_device, host = request.device_budget is not None, request.limits.host_memory
        working = sum(request.working_bytes)
        purpose = "its embeddings, its vocabulary projection, a layer and its working memory"
        if on_device:  # embeddings and projection leave the device while layers run
            require_memory(self.name, max(fixed, layer) + working, request.device_budget, purpose)
        needed = fixed + layer + (0 if on_device else working)
        asked = self._resident_layers or 0
        if asked:
            purpose = f"{asked} resident layers, {purpose}"
        require_memory(self.name, needed + asked * layer, host, purpose)
        if self._resident_layers is None and host is not None:
            asked = max(0, host - needed - SLACK_BYTES) // layer
        return min(asked, request.model.shape.num_layers)

    def _load(self, folder: str, device: str) -> Any:
        # oLLM's names of models say no more than how the checkpoint is stored: in shards, or in one file
        stored = "llama3-8B-chat" if (Path(folder) / "model.safetensors.index.json").exists() else "llama3-1B-chat"
        self._inference = ollm.Inference(stored, device=device, logging=False)
        self._inference.tokenizer = None  # else it loads one; the harness passes token ids
        self._inference.load_model(folder)
        module = self._inference.model
        if device == "cpu":  # else views of a mapped file, which the kernel evicts and rereads
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
        _read_rope_parameters(module)
        return module

    def _run_batch(
        self,
        batch: list[api.GenerationRequest],
        decode: Callable[[Sequence[int]], str] | None,
        began: float,
    ) -> list[api.GenerationResult]:
        if self._disk_cache:  # a new one empties its folder
            self._generate_options = {"past_key_values": self._inference.DiskCache(str(self._cache_folder))}
        return super()._run_batch(batch, decode, began)


def _read_rope_parameters(module: Any) -> None:
    """Applies the `rope_parameters` of a configuration that transformers 5 wrote, which transformers 4 ignores."""
    config = module.config
    if rope := getattr(config, "rope_parameters", None):
        config.rope_theta = rope["rope_theta"]
        config.rope_scaling = None if rope["rope_type"] == "default" else rope
        module.model.rotary_emb = type(module.model.rotary_emb)(config, device=module.device)
