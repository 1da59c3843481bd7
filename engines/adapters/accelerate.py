"""Hugging Face Accelerate's offloading: what fits in RAM, the rest read from disk layer by layer.

Configured as its documentation does for inference under a memory limit, in the best way found
(transformers 5.23, accelerate 1.15, CPU):

- `from_pretrained(device_map="auto", max_memory={"cpu": share}, offload_folder=scratch)`. Safetensors are not
  saved again: modules on "disk" are read from the checkpoint's own shards at every pass, in the stored dtype,
  and `offload_folder` stays empty. So float32 compute over 16-bit weights reads 16-bit bytes and casts one
  module at a time; modules on "cpu" are cast once, at load, and take the compute dtype's size in RAM.
- Without a cast, modules on "cpu" would stay mapped files, which the kernel drops under pressure and reads
  again: they are copied to memory, so that RAM means RAM.
- Accelerate works module by module (one linear layer or embedding at a time), so the least memory it can run
  in is its largest tensor. `device_map="auto"` itself keeps room for the largest layer inside the share.
- glibc keeps freed blocks below a threshold that grows to 32 MiB; with a weight cast anew in every module that
  cost 1.1 GB on a 1.3B model at float32, 0.15 GB with the threshold fixed at 1 MiB, at the same speed. It is
  fixed here, as MALLOC_MMAP_THRESHOLD_ would.
"""

from __future__ import annotations

import ctypes
from typing import Any

import accelerate  # noqa: F401  (imported with the engine, so that it counts as idle footprint and not as budget)

from engines.adapters.causal_lm import CausalLMEngine, Placement, from_checkpoint
from engines.common.cuda_device import cuda
from engines.common.work_memory import SLACK_BYTES, working_bytes
from engines.models import checkpoints
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    InfeasibleError,
    Job,
    LocalModel,
    ModelShape,
    OffloadPolicy,
)
from harness.common.host_memory import free_memory

#: Without a limit the part of the memory that is free which weights may take.
_FREE_SHARE = 0.8


class AccelerateEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size and policy.compute_dtype. Under a limit of host memory it gives Accelerate

        share = budget - KV cache - activations - passing tensor - slack

    of RAM for weights. The passing tensor is the largest one, both as the pages it is read from and as the copy
    it is computed with: without that room the kernel evicts and rereads pages without end. KV cache and
    activations are for `gpu_batch_size` sequences of the job's `max_sequence` tokens. With limits.device_memory these,
    and the largest tensor on its way, are kept free there, weights fill what is left of it first, and RAM is for
    weights but for the tensor they are read through.
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

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        given = cuda(limits)
        room: dict[int | str, int] | None
        if given is not None:
            room, notes = self._device_share(model, dtype, policy.gpu_batch_size, given, limits, job.max_sequence)
        else:
            share, notes = self._share(model, dtype, policy.gpu_batch_size, limits.host_memory, job.max_sequence)
            room = None if share is None else {"cpu": share}
        _return_freed_memory()
        module = from_checkpoint(model, dtype, device_map="auto", max_memory=room, offload_folder=str(job.scratch))
        if dtype == model.dtype:
            _make_resident(module)
        tiers = weights_by_tier(module, DTYPE_BYTES[model.dtype])
        return Placement(module, tiers, notes, "cpu" if given is None else "cuda")

    def _share(
        self, model: LocalModel, dtype: Dtype, batch: int, budget: int | None, tokens: int
    ) -> tuple[int | None, tuple[str, ...]]:
        """The RAM for weights that Accelerate is given, and how it came about."""
        stored = checkpoints.largest_tensor_bytes(model.path)
        largest = stored * DTYPE_BYTES[dtype] // DTYPE_BYTES[model.dtype]
        if budget is not None and largest > budget:
            raise InfeasibleError(
                f"accelerate needs at least {largest / 2**20:.1f} MiB for its largest layer or embedding in "
                f"{dtype}; the budget is {budget / 2**20:.1f} MiB"
            )
        if self._cpu_memory is not None:
            return self._cpu_memory, (f"max_memory cpu = {self._cpu_memory} bytes (set by option)",)
        if budget is None:
            return None, ("no limit: device_map auto decides",)
        kv, activations = self._working(model.shape, batch, tokens, DTYPE_BYTES[dtype])
        share = max(0, budget - kv - activations - stored - largest - SLACK_BYTES)
        return share, (
            f"max_memory cpu = {share} bytes = budget {budget} - KV cache {kv} - activations {activations} "
            f"- passing tensor {stored} + {largest} - slack {SLACK_BYTES}, for {batch} x {tokens} tokens",
        )

    def _device_share(
        self, model: LocalModel, dtype: Dtype, batch: int, given: int, limits: HardwareLimits, tokens: int
    ) -> tuple[dict[int | str, int], tuple[str, ...]]:
        """What Accelerate is given of the device and of RAM for weights, and how it came about."""
        stored = checkpoints.largest_tensor_bytes(model.path)
        largest = stored * DTYPE_BYTES[dtype] // DTYPE_BYTES[model.dtype]
        kv, activations = self._working(model.shape, batch, tokens, DTYPE_BYTES[dtype])
        device = given - kv - activations - largest - SLACK_BYTES
        if device < 0:
            raise InfeasibleError(
                f"accelerate needs {(given - device) / 2**20:.0f} MiB of device memory for {batch} x {tokens} tokens: "
                f"KV cache {kv / 2**20:.0f}, activations {activations / 2**20:.0f}, its largest tensor "
                f"{largest / 2**20:.0f}, slack {SLACK_BYTES / 2**20:.0f}; the limit leaves {given / 2**20:.0f} beside "
                "CUDA itself: lower gpu_batch_size, or raise limits.device_memory",
                {"device": -device},
            )
        budget = limits.host_memory or int(_FREE_SHARE * free_memory())
        host = max(0, budget - stored - SLACK_BYTES) if self._cpu_memory is None else self._cpu_memory
        return {0: device, "cpu": host}, (
            f"max_memory 0 = {device} bytes = {given} beside CUDA itself - KV cache {kv} - "
            f"activations {activations} - passing tensor {largest} - slack {SLACK_BYTES}, for {batch} x {tokens} "
            f"tokens; cpu = {host} bytes",
        )

    def _working(self, shape: ModelShape, batch: int, tokens: int, dtype_bytes: int) -> tuple[int, int]:
        """Bytes of KV cache and of activations."""
        return working_bytes(shape, batch, tokens, dtype_bytes)


def weights_by_tier(module: Any, stored_bytes: int) -> tuple[int, int, int]:
    """Bytes on device, host and disk from `hf_device_map`: in the compute dtype in RAM, as stored on disk."""
    placement = getattr(module, "hf_device_map", {"": "cpu"})  # absent when nothing had to be dispatched
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


def _make_resident(module: Any) -> None:
    """Copies parameters that are still views of a mapped file into memory of their own."""
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _return_freed_memory() -> None:
    """Has glibc give blocks of 1 MiB and more back to the system when freed; other C libraries do so anyway."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_mmap_threshold = -3  # from malloc.h; setting it also stops it from growing
        mallopt(m_mmap_threshold, 1 << 20)
