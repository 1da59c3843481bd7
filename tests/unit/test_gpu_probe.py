"""The probe of a device says what NVML says, and that there is nothing where there is nothing."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from harness.probes.gpu import GpuProbe


class Nvml:
    """A driver with one device, whose counters go on between readings."""

    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198

    def __init__(self, pid=None, counts=True):
        self.pid, self.counts, self.reads, self.looked, self.asked = pid, counts, 0, 0, None

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked = index
        return "device"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        return "device"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self.looked += 1
        if self.looked == 1:  # it has no context yet
            return []
        return [SimpleNamespace(pid=1, usedGpuMemory=7), SimpleNamespace(pid=self.pid, usedGpuMemory=3 << 30)]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self.reads += 1
        values = {197: 1000 * self.reads, 198: 5000 * self.reads}
        return [
            SimpleNamespace(nvmlReturn=0 if self.counts else 3, value=SimpleNamespace(ullVal=values[f])) for f in fields
        ]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 2500 * self.reads


def measured(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with GpuProbe(period_s=0.01) as probe:
        time.sleep(0.05)
    return {m.name: m for m in probe.measurements("generate")}


def test_it_tells_memory_bytes_and_energy(monkeypatch):
    found = measured(monkeypatch, Nvml(pid=os.getpid()))
    assert set(found["device_memory_bytes"].samples) == {float(3 << 30)}
    assert found["device_memory_bytes"].note == "of this process"
    assert found["device_received_bytes"].samples == (5000.0,)
    assert found["device_sent_bytes"].samples == (1000.0,)
    assert found["device_energy_j"].samples == (2.5,)


def test_what_the_driver_does_not_tell_is_null_or_said(monkeypatch):
    found = measured(monkeypatch, Nvml(pid=-1, counts=False))
    assert set(found["device_memory_bytes"].samples) == {float(5 << 30)}
    assert "of all processes" in found["device_memory_bytes"].note
    assert found["device_sent_bytes"].samples == ()
    assert found["device_sent_bytes"].note == "the driver does not count it"


@pytest.mark.parametrize(("visible", "asked"), [("2,3", 2), ("GPU-12ab", "GPU-12ab"), ("", 0)])
def test_it_watches_the_device_that_cuda_would_take(monkeypatch, visible, asked):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(pid=os.getpid())
    measured(monkeypatch, nvml)
    assert nvml.asked == asked


def test_without_nvml_everything_is_null(monkeypatch):
    found = measured(monkeypatch, None)
    assert len(found) == 4
    assert all(not m.samples and "nvidia-ml-py" in m.note for m in found.values())


def test_a_counter_that_began_anew_tells_nothing(monkeypatch):
    nvml = Nvml(pid=os.getpid())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with GpuProbe(period_s=0.01) as probe:
        nvml.reads = -3
    assert [m.samples for m in probe.measurements("load") if m.name == "device_sent_bytes"] == [()]
