"""How many threads compute, and what is left of a machine under limits: fewer threads than all, less memory.

Source: LM-Offload (Wu et al. 2024), section 4, algorithm 3: of as many threads as there are, each of the five streams
of loads and stores gets one, and the number for arithmetic is enumerated over what is left. Our passes run one
product or attention at a time, so all of the others work on it: there is nothing to divide between operators.
"""

from __future__ import annotations

from dataclasses import replace

from engines.planning.machine import faster
from harness.api import HardwareLimits, HardwareProfile, Processor
from harness.common.curve import interpolate

#: Weights, cache and activations to be loaded, cache and activations to be stored.
_STREAMS = 5
#: Rates that differ by less are taken to be the same; the fewest threads have them too.
_ALIKE = 0.01


def allotted(profile: HardwareProfile) -> int | None:
    """The threads that compute fastest beside those of the streams; None where there is nothing to divide, or where
    nobody has measured what fewer threads do."""
    host = profile.host
    if host.cores <= _STREAMS or not host.by_threads:
        return None
    rates = {count: _rate(host, count) for count in range(1, host.cores - _STREAMS + 1)}
    most = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= (1 - _ALIKE) * most)


def on_threads(host: Processor, count: int) -> Processor:
    """A host that computes on so many threads: all that it computes takes longer as products do, attention too."""
    if count >= host.cores or not host.by_threads:
        return host
    share = _rate(host, count) / _rate(host, host.cores)
    return replace(
        faster(host, share), attention={bits: share * rate for bits, rate in host.attention.items()}, cores=count
    )


def limited(profile: HardwareProfile, limits: HardwareLimits) -> HardwareProfile:
    """The machine as a cell may use it: of one that was measured, no device unless it is given."""
    if profile.host_id and limits.device_memory is None:
        profile = replace(profile, device=None, link=None, devices=0, between=None)
    host, device, disk = profile.host, profile.device, profile.disk
    if limits.host_memory is not None:
        host = replace(host, memory=min(host.memory, limits.host_memory))
    if limits.threads is not None:
        host = on_threads(host, limits.threads)
    if limits.device_memory is not None and device is not None:
        device = replace(device, memory=min(device.memory, limits.device_memory))
    if limits.disk_bandwidth is not None:
        disk = replace(disk, read=min(disk.read, limits.disk_bandwidth), write=min(disk.write, limits.disk_bandwidth))
    return replace(profile, host=host, device=device, disk=disk)


def _rate(host: Processor, count: int) -> float:
    return interpolate(sorted((float(at), rate) for at, rate in host.by_threads.items()), count)
