"""Memory of a process, and its samples over a phase: anonymous and file-backed resident bytes."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from harness.api import Measurement, Phase
from harness.probes.family import family

_MAX_SAMPLES = 240


class SamplingProbe(ABC):
    """Takes samples from a thread: one at the start of a phase, one every `period_s`, and one at its end."""

    def __init__(self, period_s: float = 0.05) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampling-probe", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._sample()

    @abstractmethod
    def _sample(self) -> None:
        """Takes one sample."""


def window_peaks(samples: Sequence[int]) -> tuple[tuple[float, ...], int]:
    """Peaks of consecutive windows, and how many samples a window has: a long phase takes little space in the record
    and keeps its maximum."""
    window = max(1, -(-len(samples) // _MAX_SAMPLES))
    return tuple(float(max(samples[i : i + window])) for i in range(0, len(samples), window)), window


class MemoryProbe(SamplingProbe):
    """Samples RssAnon and RssFile (with shared memory), of this process and its children."""

    def __init__(self, period_s: float = 0.05) -> None:
        super().__init__(period_s)
        self._anonymous: list[int] = []
        self._file: list[int] = []

    def _sample(self) -> None:
        each = [_resident(pid) for pid in family()]
        self._anonymous.append(sum(fields.get("RssAnon", 0) for fields in each))
        self._file.append(sum(fields.get("RssFile", 0) + fields.get("RssShmem", 0) for fields in each))

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`rss_anon_bytes` and `rss_file_bytes`, peaks of windows."""
        measurements = []
        for name, samples in (("rss_anon_bytes", self._anonymous), ("rss_file_bytes", self._file)):
            peaks, window = window_peaks(samples)
            note = f"peak of each {window * self._period_s:.2f} s"
            measurements.append(Measurement(name, "bytes", peaks, phase, note))
        return measurements


def held_bytes(process: int | str = "self") -> int:
    """Bytes of a process (a pid or "self") without a backing file: anonymous memory, also what of it was swapped out,
    and shared memory such as pinned; 0 once it is gone."""
    fields = _resident(process)
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0) + fields.get("VmSwap", 0)


def _resident(process: int | str = "self") -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines()]
        return {
            line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line and line[0].startswith(("Rss", "VmSwap"))
        }
    return {}
