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
        self._begun, self.work = False, []

    def nvmlInit(self):
        self._begun = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-abc": "device"}[uuid]

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        assert self._begun and self.work == ["product", "waited for"], "libraries are loaded by their first use"
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
    work = [] if nvml is None else nvml.work
    monkeypatch.setattr(torch, "mm", lambda a, b: work.append("product"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: work.append("waited for"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    properties = types.SimpleNamespace(uuid="abc", total_memory=16_000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: properties}.__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(cuda_device, "context_bytes", cuda_device.context_bytes.__wrapped__)
    assert cuda_device.device_budget(api.HardwareLimits(device_memory=4000 * MIB)) == 4000 * MIB - expected
    assert parts == [pytest.approx((4000 * MIB - expected) / (16_000 * MIB))]


def test_a_limit_is_at_most_the_device(monkeypatch):
    properties = types.SimpleNamespace(total_memory=4000 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: properties}.__getitem__)
    monkeypatch.setattr(cuda_device, "context_bytes", lambda: 500 * MIB)
    assert cuda_device.device_budget(api.HardwareLimits(device_memory=4000 * MIB)) == 3500 * MIB
    with pytest.raises(api.UnsupportedError, match="is 4001 MiB, the device has 4000 MiB"):
        cuda_device.device_budget(api.HardwareLimits(device_memory=4001 * MIB))
