"""Memory of this process over time: anonymous and file-backed resident bytes."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.api import Measurement, Phase

_MAX_SAMPLES = 240


class MemoryProbe:
    """Samples RssAnon and RssFile (with shared memory) from a thread every `period_s`."""

    def __init__(self, period_s: float = 0.05) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._samples: list[tuple[int, int]] = []

    def __enter__(self) -> MemoryProbe:
        self._samples = [resident_bytes()]
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._samples.append(resident_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._samples.append(resident_bytes())

    def measurements(self, phase: Phase) -> list[Measurement]:
        """Peaks of consecutive windows: a long phase takes little space in the record and keeps its maximum."""
        window = -(-len(self._samples) // _MAX_SAMPLES)
        chunks = [self._samples[i : i + window] for i in range(0, len(self._samples), window)]
        anon = tuple(float(max(a for a, _ in c)) for c in chunks)
        file = tuple(float(max(f for _, f in c)) for c in chunks)
        note = f"peak of each {window * self._period_s:.2f} s"
        return [
            Measurement("rss_anon_bytes", "bytes", anon, phase, note),
            Measurement("rss_file_bytes", "bytes", file, phase, note),
        ]


def held_bytes() -> int:
    """Resident bytes of this process without a backing file: anonymous memory, and shared memory such as pinned."""
    fields = _resident()
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def resident_bytes() -> tuple[int, int]:
    """(anonymous, file-backed and shared) resident bytes of this process now."""
    fields = _resident()
    return fields.get("RssAnon", 0), fields.get("RssFile", 0) + fields.get("RssShmem", 0)


def _resident() -> dict[str, int]:
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.startswith("Rss"):
            fields[key] = int(value.split()[0]) * 1024
    return fields
