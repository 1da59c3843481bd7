"""What a limit of device memory leaves to an engine."""

import os
import sys
import types

import pytest
import torch

from engines.common import cuda_device
from engines.common.work_memory import CONTEXT_BYTES
from harness import api

MIB = 1 << 20


class _NVML:
    """As pynvml, for a device with these processes."""

    def __init__(self, *processes):
        self._processes = [types.SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes]

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-abc": "device"}[uuid]

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return {"device": self._processes}[device]


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (_NVML((1, 9000 * MIB), (os.getpid(), 802 * MIB)), 800 * MIB),
        (_NVML((os.getpid(), 300 * MIB)), CONTEXT_BYTES),
        (_NVML((1, 9000 * MIB)), CONTEXT_BYTES),
        (None, CONTEXT_BYTES),
    ],
    ids=["a large context", "a small one", "not known by this number", "no NVML"],
)
def test_the_context_counts_as_a_part_of_the_limit(nvml, expected, monkeypatch):
    """The allocator gets what is left, as a part of the whole device."""
    ones, parts = torch.ones, []

    def ones_here(*shape, device, dtype):
        return ones(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "ones", ones_here)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    properties = types.SimpleNamespace(uuid="abc", total_memory=16_000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(cuda_device, "context_bytes", cuda_device.context_bytes.__wrapped__)
    assert cuda_device.device_budget(api.HardwareLimits(device_memory=4000 * MIB)) == 4000 * MIB - expected
    assert parts == [pytest.approx((4000 * MIB - expected) / (16_000 * MIB))]
