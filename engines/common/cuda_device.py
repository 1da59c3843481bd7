"""The CUDA device that a cell's limits give to an engine built on torch."""

import importlib
import os
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from engines.common.work_memory import CONTEXT_BYTES
from harness.api import HardwareLimits, InfeasibleError, UnsupportedError

#: Libraries of products take some 32 MiB of it by themselves.
_LEAST_BYTES = 64 << 20


def device_budget(limits: HardwareLimits) -> int | None:
    """Caps torch's allocator in this process and returns the cap in bytes: `limits.device_memory` less
    `context_bytes`.

    None where the cell has no device. Raises UnsupportedError where the machine has no CUDA device, or a smaller one,
    InfeasibleError where next to nothing is left.
    """
    if limits.device_memory is None:
        return None
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"limits.device_memory: this machine has no CUDA device, or torch {torch.__version__} is built without "
            "CUDA: install a build with CUDA, or leave the limit out"
        )
    whole = torch.cuda.get_device_properties(0).total_memory
    if limits.device_memory > whole:
        raise UnsupportedError(
            f"limits.device_memory is {limits.device_memory / 2**20:.0f} MiB, the device has {whole / 2**20:.0f} MiB: "
            "lower the limit"
        )
    budget = limits.device_memory - context_bytes()
    if budget < _LEAST_BYTES:
        raise InfeasibleError(
            f"limits.device_memory is {limits.device_memory / 2**20:.0f} MiB, of which CUDA itself takes "
            f"{context_bytes() / 2**20:.0f} MiB here: raise the limit"
        )
    torch.cuda.set_per_process_memory_fraction(budget / whole)
    return budget


@cache
def context_bytes() -> int:
    """Bytes of the device that CUDA's context and libraries hold for this process, outside torch's allocator. Measured
    once, so that the allocator's cap and memory plans count with the same.

    As NVML counts them once a product has run (750 MiB of an H200); at least CONTEXT_BYTES, and these where NVML does
    not tell.
    """
    half = torch.ones(16, 16, dtype=torch.float16, device="cuda")
    torch.mm(half, half)
    torch.cuda.synchronize()
    held = 0
    with suppress(Exception):  # no NVML, or one that does not know this process by its number
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        own = [each for each in nvml.nvmlDeviceGetComputeRunningProcesses(device) if each.pid == os.getpid()]
        held = int(own[0].usedGpuMemory) - torch.cuda.memory_reserved()
    return max(CONTEXT_BYTES, held)
