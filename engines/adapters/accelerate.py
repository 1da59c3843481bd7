"""Hugging Face Accelerate's offloading: weights in RAM as far as they fit, the rest read from disk in every pass.

Configured as its documentation recommends for inference under a memory limit, with the fastest settings that we
measured (transformers 5.23, accelerate 1.15, CPU):

- `from_pretrained(device_map="auto", max_memory={"cpu": share}, offload_folder=scratch)`. Accelerate does not save
  safetensors again: it reads modules on "disk" from the checkpoint's shards in every pass, in the stored dtype, and
  `offload_folder` stays empty. Float32 compute over 16-bit weights therefore reads 16-bit bytes and casts one module
  at a time; modules on "cpu" are cast once, at load, and take the compute dtype's size in RAM.
- Without a cast, modules on "cpu" would stay memory-mapped, and the kernel would evict and reread them under
  pressure. We copy them to anonymous memory.
- Accelerate works module by module (one linear layer or embedding at a time), so it needs at least the memory of its
  largest tensor. `device_map="auto"` reserves room for the largest layer inside the share.
- glibc keeps freed blocks below a threshold that grows to 32 MiB. With a weight cast in every module that costs
  1.1 GB on a 1.3B model at float32, against 0.15 GB at the same speed with the threshold fixed at 1 MiB. We fix it,
  as the variable MALLOC_MMAP_THRESHOLD_ would.
"""

from typing import Any

import accelerate  # noqa: F401  (imported with the engine, so that it counts as idle footprint and not as budget)

from engines.adapters.causal_lm import CausalLMEngine, PlacedModule, PlacementRequest, from_checkpoint
from engines.common.freed_memory import return_freed_memory
from engines.common.work_memory import SLACK_BYTES, require_memory
from engines.models import checkpoints
from harness.api import DTYPE_BYTES, Capabilities, InfeasibleError
from harness.common.host_memory import free_memory

#: The fraction of free memory that weights may take where host memory has no limit.
_FREE_SHARE = 0.8


class AccelerateEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size and policy.compute_dtype. Under a host memory limit it gives Accelerate

        share = budget - KV cache - activations - largest tensor (as stored, and as computed) - slack

    of RAM for weights. Without room for the largest tensor, both the pages it is read from and the copy it is computed
    with, the kernel evicts and rereads pages endlessly. KV cache and activations are for `gpu_batch_size` sequences of
    the job's `max_sequence` tokens. With limits.device_memory, KV cache, activations and one copy of the largest tensor
    are reserved on the device, and weights fill the rest of the device first, then RAM less one stored copy of the
    largest tensor.

    `cpu_memory` (bytes) sets the share instead; `disk_only` makes it 0. Without a limit Accelerate decides.
    """

    name = "accelerate"

    def __init__(self, *, cpu_memory: int | None = None, disk_only: bool = False) -> None:
        if disk_only and cpu_memory is not None:
            raise TypeError("disk_only and cpu_memory exclude each other")
        if cpu_memory is not None and cpu_memory < 0:
            raise TypeError("cpu_memory must be at least 0")
        self._cpu_memory = 0 if disk_only else cpu_memory

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors", "accelerate"))

    def _place(self, request: PlacementRequest) -> PlacedModule:
        max_memory, note = self._max_memory(request)
        return_freed_memory()
        module = from_checkpoint(
            request, device_map="auto", max_memory=max_memory, offload_folder=str(request.job.scratch)
        )
        if request.dtype == request.model.dtype:  # not cast, so parameters may be views of a mapped file
            for parameter in module.parameters():
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.clone()
        return PlacedModule(module, weights_by_tier(module, DTYPE_BYTES[request.model.dtype]), (note,))

    def _max_memory(self, request: PlacementRequest) -> tuple[dict[int | str, int] | None, str]:
        """Accelerate's `max_memory` for weights (None: Accelerate decides) and a note that derives it. Raises
        InfeasibleError where a budget has no room for weights."""
        device, host_memory = request.device_budget, request.limits.host_memory
        stored = checkpoints.largest_tensor_bytes(request.model.path)
        computed = stored * request.dtype_bytes // DTYPE_BYTES[request.model.dtype]
        kv, activations = self._working_bytes(request)
        sequences = f"{request.policy.gpu_batch_size} x {request.job.max_sequence} tokens"
        if device is not None:
            weights = device - kv - activations - computed - SLACK_BYTES
            if weights < 0:
                raise InfeasibleError(
                    f"accelerate needs {(device - weights) / 2**20:.0f} MiB of device memory for {sequences}: KV cache "
                    f"{kv / 2**20:.0f}, activations {activations / 2**20:.0f}, its largest tensor "
                    f"{computed / 2**20:.0f}, slack {SLACK_BYTES / 2**20:.0f}; the limit leaves {device / 2**20:.0f} "
                    "beside the CUDA context: lower gpu_batch_size, or raise limits.device_memory",
                    {"device": -weights},
                )
            budget = host_memory or int(_FREE_SHARE * free_memory())
            host = max(0, budget - stored - SLACK_BYTES) if self._cpu_memory is None else self._cpu_memory
            return {0: weights, "cpu": host}, (
                f"max_memory 0 = {weights} bytes = {device} beside the CUDA context - KV cache {kv} - activations "
                f"{activations} - largest tensor {computed} - slack {SLACK_BYTES}, for {sequences}; cpu = {host} bytes"
            )
        require_memory(self.name, computed, host_memory, f"its largest layer or embedding in {request.dtype}")
        if self._cpu_memory is not None:
            return {"cpu": self._cpu_memory}, f"max_memory cpu = {self._cpu_memory} bytes (set by option)"
        if host_memory is None:
            return None, "no limit: device_map auto decides"
        host = max(0, host_memory - kv - activations - stored - computed - SLACK_BYTES)
        return {"cpu": host}, (
            f"max_memory cpu = {host} bytes = budget {host_memory} - KV cache {kv} - activations {activations} "
            f"- largest tensor {stored} + {computed} - slack {SLACK_BYTES}, for {sequences}"
        )

    def _working_bytes(self, request: PlacementRequest) -> tuple[int, int]:
        """Bytes of (KV cache, activations)."""
        return request.working_bytes


def weights_by_tier(module: Any, stored_bytes: int) -> tuple[int, int, int]:
    """Bytes on (device, host, disk) by `hf_device_map`: in the module's dtype in memory, in the stored one on disk."""
    placement = getattr(module, "hf_device_map", {"": "cpu"})  # absent when Accelerate dispatched nothing
    device = host = disk = 0
    for name, parameter in module.named_parameters():
        if name in module.all_tied_weights_keys:
            continue
        owner = max((key for key in placement if key == "" or f"{name}.".startswith(f"{key}.")), key=len)
        if placement[owner] == "disk":
            disk += parameter.numel() * stored_bytes
        elif placement[owner] == "cpu":
            host += parameter.numel() * parameter.element_size()
        else:
            device += parameter.numel() * parameter.element_size()
    return device, host, disk
