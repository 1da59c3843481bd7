"""The probe of a device says what NVML says, and that there is nothing where there is nothing."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from harness.probes.gpu import GpuProbe


class Nvml:
    """A driver with one device, whose counters go on with every reading; of bytes it tells 32 bits, if `wraps`."""

    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    NVML_VALUE_TYPE_UNSIGNED_INT = 1

    def __init__(self, pid=None, counts=True, wraps=False):
        self.pid, self.counts, self.wraps = pid, counts, wraps
        self.reads = self.looked = 0
        self.asked = None

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked = index
        return "device"

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self.looked += 1
        if self.looked == 1:  # it has no context yet
            return []
        return [SimpleNamespace(pid=1, usedGpuMemory=7), SimpleNamespace(pid=self.pid, usedGpuMemory=3 << 30)]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self.reads += 1
        found = []
        for each in ({197: 1 << 30, 198: 3 << 30}[field] for field in fields):
            whole = each * self.reads
            value = SimpleNamespace(ullVal=whole, uiVal=whole % (1 << 32))
            found.append(SimpleNamespace(nvmlReturn=0 if self.counts else 3, valueType=int(self.wraps), value=value))
        return found

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 2500 * self.reads


def measured(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with GpuProbe(period_s=0.01) as probe:
        time.sleep(0.1)
    return {m.name: m for m in probe.measurements("generate")}


@pytest.mark.parametrize("wraps", [False, True])
def test_it_tells_memory_bytes_and_energy(monkeypatch, wraps):
    """Counters of 32 bits have wrapped several times by then."""
    nvml = Nvml(pid=os.getpid(), wraps=wraps)
    found = measured(monkeypatch, nvml)
    rounds = nvml.reads - 1
    assert rounds > 2
    assert set(found["device_memory_bytes"].samples) == {float(3 << 30)}
    assert found["device_memory_bytes"].note == "of this process"
    assert found["device_received_bytes"].samples == (float(rounds * (3 << 30)),)
    assert found["device_sent_bytes"].samples == (float(rounds << 30),)
    assert found["device_energy_j"].samples == pytest.approx((2.5 * rounds,))


def test_counters_the_driver_lacks_are_null_with_a_note(monkeypatch):
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
