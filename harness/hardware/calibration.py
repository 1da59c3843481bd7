"""Measures this host for plans and saves its profile."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import hardware, registry
from harness.api import HardwareProfile, HarnessError, Prices
from harness.common.classify import classify
from harness.common.files import os_errors
from harness.common.host_memory import own_limit
from harness.hardware import provenance

#: Prefixes of rates that are steady on an idle machine, and the ratio of highest to lowest above which they are noisy.
_STEADY, NOISE = ("host.flops", "host.attention", "host.bandwidth", "disk.read"), 1.5
#: Units of rates, by their names in a profile.
_UNITS = {
    "FLOP/s": ("flops", "batched_flops", "prompts", "probed", "by_threads"),
    "B/s": ("bandwidth", "attention", "attention_by_threads", "read", "write", "h2d", "d2h", "h2d_pageable",
            "d2h_pageable"),
    "values/s": ("cached", "dequantize", "elementwise"),
    "s": ("attention_call_s", "layer_call_s", "sequence_call_s", "copy_s"),
}  # fmt: skip
#: The product that is also measured beside launches: its rows, and its columns (hidden sizes of models).
_ROWS, _COLUMNS = 256, (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Rate:
    """A measured rate of a profile: its path, and the median, lowest and highest of its rounds."""

    name: str
    median: float
    lowest: float
    highest: float

    @property
    def unit(self) -> str:
        """Of its figures; empty for fractions."""
        part = self.name.partition(".")[2].partition(".")[0]
        return next((unit for unit, parts in _UNITS.items() if part in parts), "")

    @property
    def noisy(self) -> bool:
        """Whether it varied more than on an idle machine."""
        return self.name.startswith(_STEADY) and self.highest > NOISE * self.lowest


def calibrate(
    out: Path | None, quick: bool, cache: Path, report: Callable[[str], None], prices: Prices | None = None
) -> tuple[HardwareProfile, Path]:
    """Measures this host and writes its profile to `out`, by default as the local profile; returns profile and path.

    `report` is called with the name of each measurement. `prices` are what this machine costs; those of an earlier
    profile stay where none are given. Raises HarnessError if the profile or the cache cannot be written, or where the
    machine is too small to be measured.
    """
    path = out or hardware.local_path(cache)
    hardware.require_writable(path)
    with os_errors(str(cache), "give another folder by --cache-dir"):
        cache.mkdir(parents=True, exist_ok=True)
    with _resources_in_words(cache):
        measured = registry.calibrator().measure(cache, cache, quick, report)
        dtype = measured.host.dtype
        gemm_rates = registry.machine_rates().gemm_rates
        probed = {str(k): gemm_rates([dtype], [_ROWS], k, 4 * k)[dtype][str(_ROWS)] for k in _COLUMNS}
    memory = min(measured.host.memory, own_limit() or math.inf)
    host = dataclasses.replace(measured.host, probed={k: max(rates) for k, rates in probed.items()}, memory=memory)
    profile = dataclasses.replace(
        measured, host=host, host_id=provenance.machine_key(), prices=_prices(path, prices or Prices())
    )
    profile.validate()
    hardware.save(profile, path)
    return profile, path


@contextlib.contextmanager
def _resources_in_words(cache: Path) -> Iterator[None]:
    """Turns an error for want of disk or memory, which a library may raise as anything, into a HarnessError."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as exc:
        refusal = classify(exc)
        if refusal.status == "error" and not isinstance(exc, OSError):
            raise
        advice = f"free memory, or space in {cache}, or give another folder by --cache-dir"
        raise HarnessError(f"this host cannot be measured: {refusal.reason}; {advice}") from exc


def _prices(path: Path, given: Prices) -> Prices:
    """The prices that are given, else those of the earlier profile at `path`."""
    with contextlib.suppress(HarnessError):
        earlier = hardware.load(str(path)).prices if path.exists() else Prices()
        return Prices(**{name: value if value is not None else getattr(earlier, name)
                         for name, value in dataclasses.asdict(given).items()})  # fmt: skip
    return given


def rates(profile: HardwareProfile) -> Iterator[Rate]:
    """The measured rates of a profile with their spread."""
    for path, (low, high) in profile.spread.items():
        yield Rate(path, _at(profile, path), low, high)


def _at(profile: HardwareProfile, path: str) -> float:
    part: object = profile
    for name in path.split("."):
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    assert isinstance(part, float)
    return part
