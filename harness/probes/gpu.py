"""A CUDA device over one phase, by NVML: its memory that this process holds, bytes over PCIe, energy; or null."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from dataclasses import dataclass
from typing import Any

from harness.api import Measurement, Phase

_MAX_SAMPLES = 240
_WHOSE = "of all processes: the driver does not tell them apart here"
_NONE = "no NVML: pip install nvidia-ml-py, and NVIDIA's driver"
#: What NVML counts of a device's link (nvml.h).
_TX, _RX = "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"


class GpuProbe:
    """Of the first device that this process may see: samples of memory every `period_s`, and what counters went on by.

    Directions are the device's: it receives what the host copies to it.
    """

    def __init__(self, period_s: float = 0.05) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._samples: list[tuple[int | None, int | None]] = []
        self._device = _Device.open()

    def __enter__(self) -> GpuProbe:
        self._samples = []
        self._spent: dict[str, float] = {}
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="gpu-probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = self._device.counters()
        while True:
            self._samples.append(self._device.memory())
            over = self._stop.wait(self._period_s)
            now = self._device.counters()
            for name in last.keys() & now.keys():
                spent = now[name].since(last[name])
                self._spent[name] = self._spent.get(name, 0.0) + spent
            last = now
            if over:
                return

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`device_memory_bytes` as peaks of consecutive windows, `device_received_bytes`, `device_sent_bytes` and
        `device_energy_j`; empty where the driver does not tell."""
        own = [held for held, _ in self._samples if held is not None]
        held, whose = (own, "of this process") if own else ([h for _, h in self._samples if h is not None], _WHOSE)
        window = max(1, -(-len(held) // _MAX_SAMPLES))
        peaks = tuple(float(max(held[i : i + window])) for i in range(0, len(held), window))
        note = self._device.missing
        found = [Measurement("device_memory_bytes", "bytes", peaks, phase, note or whose)]
        units = {"device_received_bytes": "bytes", "device_sent_bytes": "bytes", "device_energy_j": "J"}
        for name, unit in units.items():
            samples = (self._spent[name],) if name in self._spent else ()
            why = "" if samples else note or "the driver does not count it"
            found.append(Measurement(name, unit, samples, phase, why))
        return found


@dataclass(frozen=True)
class _Count:
    """A counter, of 32 bits (`wraps`) or more; nvml.h says of bytes that their value can be wrapped."""

    value: float
    wraps: bool = False

    def since(self, before: _Count) -> float:
        """By how much it went on; nothing where it began anew."""
        return (self.value - before.value) % 2**32 if self.wraps else max(0.0, self.value - before.value)


class _Device:
    """One device through NVML. `missing` says why there is none."""

    def __init__(self, nvml: Any, handle: Any, missing: str = "") -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing = missing

    @staticmethod
    def open() -> _Device:
        """The first that this process may see, where CUDA counts devices by their bus as NVML does (sandbox.py)."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            if first.isdigit():
                return _Device(nvml, nvml.nvmlDeviceGetHandleByIndex(int(first)))
            return _Device(nvml, nvml.nvmlDeviceGetHandleByUUID(first))
        except Exception:  # no package, no driver, no device: each with errors of its own
            return _Device(None, None, _NONE)

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes of the device that this process holds, and all do; none where the driver does not tell."""
        own = everybody = None
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                    if process.pid == os.getpid() and process.usedGpuMemory is not None:
                        own = int(process.usedGpuMemory)
            with contextlib.suppress(Exception):
                everybody = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        return own, everybody

    def counters(self) -> dict[str, _Count]:
        """What the driver counts, by the measurement's name."""
        found: dict[str, _Count] = {}
        if self._nvml is None:
            return found
        with contextlib.suppress(Exception):
            fields = [getattr(self._nvml, name) for name in (_RX, _TX)]
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
            for name, value in zip(("device_received_bytes", "device_sent_bytes"), values, strict=True):
                if value.nvmlReturn == 0:
                    wraps = value.valueType == self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
                    found[name] = _Count(float(value.value.uiVal if wraps else value.value.ullVal), wraps)
        with contextlib.suppress(Exception):
            found["device_energy_j"] = _Count(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
        return found
