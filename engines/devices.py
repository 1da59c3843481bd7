"""The CUDA device that a cell's limits give an engine of torch's, or none."""

from __future__ import annotations

import torch

from harness.api import HardwareLimits, UnsupportedError


def cuda(limits: HardwareLimits, besides: int = 0) -> bool:
    """Whether a cell runs on the device, of whose memory torch then gives out no more than the limit less `besides`.

    Raises UnsupportedError where the limits give device memory and there is no CUDA device.
    """
    if limits.device_memory is None:
        return False
    if not torch.cuda.is_available():
        raise UnsupportedError("limits.device_memory: there is no CUDA device here")
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, limits.device_memory - besides) / whole))
    return True
