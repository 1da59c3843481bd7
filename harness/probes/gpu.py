"""A CUDA device over one phase, by NVML: its memory that this process holds, bytes over PCIe, energy; or null."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

from harness.api import Measurement, Phase

_MAX_SAMPLES = 240
_NONE = "no NVML: pip install nvidia-ml-py, and NVIDIA's driver"
#: What NVML counts (nvml.h), in the order of `_Counters.read`.
_TX, _RX = "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"


class GpuProbe:
    """Of the first device that this process may see: samples of memory every `period_s`, and what counters went on by.

    Directions are the device's: it receives what the host copies to it.
    """

    def __init__(self, period_s: float = 0.05) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._samples: list[int] = []
        self._device = _Device.open()

    def __enter__(self) -> GpuProbe:
        self._samples = []
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="gpu-probe", daemon=True)
        self._thread.start()
        self._before = self._device.counters()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = self._device.counters()
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            if (held := self._device.memory()) is not None:
                self._samples.append(held)
            if self._stop.wait(self._period_s):
                return

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`device_memory_bytes` as peaks of consecutive windows, `device_received_bytes`, `device_sent_bytes` and
        `device_energy_j`; empty where the driver does not tell."""
        window = max(1, -(-len(self._samples) // _MAX_SAMPLES))
        chunks = [self._samples[i : i + window] for i in range(0, len(self._samples), window)]
        peaks = tuple(float(max(chunk)) for chunk in chunks)
        note = self._device.missing
        found = [Measurement("device_memory_bytes", "bytes", peaks, phase, note or self._device.whose)]
        units = {"device_received_bytes": "bytes", "device_sent_bytes": "bytes", "device_energy_j": "J"}
        for name, unit in units.items():
            known = name in self._before and name in self._after
            samples = (self._after[name] - self._before[name],) if known else ()
            found.append(
                Measurement(name, unit, samples, phase, note if known or note else "the driver does not count it")
            )
        return found


class _Device:
    """One device through NVML. `missing` says why there is none, `whose` what its memory is counted of."""

    def __init__(self, nvml: Any, handle: Any, missing: str = "") -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing = missing
        self.whose = "of this process"

    @staticmethod
    def open() -> _Device:
        """The device that CUDA would call the first."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            if first.isdigit():
                return _Device(nvml, nvml.nvmlDeviceGetHandleByIndex(int(first)))
            return _Device(nvml, nvml.nvmlDeviceGetHandleByUUID(first))
        except Exception:  # no package, no driver, no device: each with errors of its own
            return _Device(None, None, _NONE)

    def memory(self) -> int | None:
        """Bytes of the device that this process holds; where the driver does not tell whose (in a container), all."""
        if self._nvml is None:
            return None
        with contextlib.suppress(Exception):
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
        with contextlib.suppress(Exception):
            self.whose = "of all processes: the driver does not tell them apart here"
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        return None

    def counters(self) -> dict[str, float]:
        """What the driver counts, by the measurement's name."""
        found: dict[str, float] = {}
        if self._nvml is None:
            return found
        with contextlib.suppress(Exception):
            fields = [getattr(self._nvml, name) for name in (_RX, _TX)]
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
            for name, value in zip(("device_received_bytes", "device_sent_bytes"), values, strict=True):
                if value.nvmlReturn == 0:
                    found[name] = float(value.value.ullVal)
        with contextlib.suppress(Exception):
            found["device_energy_j"] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        return found
