"""The CUDA device that a cell's limits give to an engine built on torch."""

import torch

from engines.common.work_memory import CONTEXT_BYTES
from harness.api import HardwareLimits, UnsupportedError


def device_budget(limits: HardwareLimits) -> int | None:
    """Caps torch's allocator in this process and returns the cap in bytes: `limits.device_memory` less CUDA's context.

    None where the cell has no device. Raises UnsupportedError where the machine has no CUDA device, or a smaller one.
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
    budget = max(0, limits.device_memory - CONTEXT_BYTES)
    torch.cuda.set_per_process_memory_fraction(budget / whole)
    return budget
