"""A CUDA device over one phase, from NVML: memory held by this process, bytes over PCIe, energy."""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass

from harness.api import Measurement, Phase
from harness.probes.counters import counted
from harness.probes.memory import SamplingProbe, window_peaks

_ALL_PROCESSES = "of all processes: the driver reports no memory per process here"
_NO_NVML = "no NVML: pip install nvidia-ml-py, and NVIDIA's driver"
#: NVML's counters of a device's PCIe link (nvml.h).
_TX, _RX = "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"


class GpuProbe(SamplingProbe):
    """Samples the memory of this process's first visible device every `period_s`, and sums its counters' increments.

    Directions are seen from the device: it receives what the host copies to it.
    """

    def __init__(self, period_s: float = 0.05) -> None:
        super().__init__(period_s)
        self._device = _Device()
        self._held: list[tuple[int | None, int | None]] = []
        self._last: dict[str, _Count] = {}
        self._spent: dict[str, float] = {}

    def _sample(self) -> None:
        self._held.append(self._device.memory())
        counters = self._device.counters()
        for name in self._last.keys() & counters.keys():
            self._spent[name] = self._spent.get(name, 0.0) + counters[name].since(self._last[name])
        self._last = counters

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`device_memory_bytes` as peaks of consecutive windows, `device_received_bytes`, `device_sent_bytes` and
        `device_energy_j`; no samples of a figure that the driver does not report."""
        held, scope = [process for process, _ in self._held if process is not None], "of this process"
        if not held:
            held, scope = [total for _, total in self._held if total is not None], _ALL_PROCESSES
        note = self._device.missing
        memory = Measurement("device_memory_bytes", "bytes", window_peaks(held)[0], phase, note or scope)
        units = {"device_received_bytes": "bytes", "device_sent_bytes": "bytes", "device_energy_j": "J"}
        reason = note or "the driver does not count it"
        return [memory, *(counted(name, unit, self._spent, phase, reason) for name, unit in units.items())]


@dataclass(frozen=True)
class _Count:
    """A counter's value. With `wraps` it has 32 bits and can wrap, as nvml.h says of the byte counters."""

    value: float
    wraps: bool = False

    def since(self, before: _Count) -> float:
        """The increment since `before`; 0 if a wider counter was reset."""
        return (self.value - before.value) % 2**32 if self.wraps else max(0.0, self.value - before.value)


class _Device:
    """The first visible device through NVML. `missing` says why NVML gives none."""

    def __init__(self) -> None:
        self.missing = ""
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            if first.isdigit():  # NVML's index too: workers set CUDA_DEVICE_ORDER to the bus order
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(int(first))
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(first)
        except Exception:  # no package, no driver or no device: each raises different errors
            self.missing = _NO_NVML

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes of device memory held by this process and by all processes; None if the driver does not report it."""
        process_bytes = total_bytes = None
        if not self.missing:
            with contextlib.suppress(Exception):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                    if process.pid == os.getpid() and process.usedGpuMemory is not None:
                        process_bytes = int(process.usedGpuMemory)
            with contextlib.suppress(Exception):
                total_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        return process_bytes, total_bytes

    def counters(self) -> dict[str, _Count]:
        """The driver's counters by the name of their measurement."""
        counters: dict[str, _Count] = {}
        if self.missing:
            return counters
        with contextlib.suppress(Exception):
            fields = [getattr(self._nvml, name) for name in (_RX, _TX)]
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
            for name, value in zip(("device_received_bytes", "device_sent_bytes"), values, strict=True):
                if value.nvmlReturn == 0:
                    wraps = value.valueType == self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
                    counters[name] = _Count(float(value.value.uiVal if wraps else value.value.ullVal), wraps)
        with contextlib.suppress(Exception):
            counters["device_energy_j"] = _Count(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
        return counters
