"""The CUDA device that a cell's limits give an engine of torch's, or none."""

from __future__ import annotations

import torch

from engines.common.work_memory import CONTEXT_BYTES
from harness.api import HardwareLimits, UnsupportedError


def cuda(limits: HardwareLimits) -> int | None:
    """Bytes of the device that torch gives out in this process from now on, the limit less what CUDA itself takes; None
    for a cell without a device.

    Raises UnsupportedError where there is none, or none that is so large.
    """
    if limits.device_memory is None:
        return None
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"limits.device_memory: there is no CUDA device here, or torch {torch.__version__} is built without CUDA: "
            "install a build with it, or leave the limit out"
        )
    whole = torch.cuda.get_device_properties(0).total_memory
    if limits.device_memory > whole:
        raise UnsupportedError(
            f"limits.device_memory is {limits.device_memory / 2**20:.0f} MiB, the device has {whole / 2**20:.0f}: "
            "lower it"
        )
    given = max(0, limits.device_memory - CONTEXT_BYTES)
    torch.cuda.set_per_process_memory_fraction(given / whole)
    return given
