"""How many threads compute, and what limits leave of a machine: fewer threads, less memory, a slower disk.

Source: LM-Offload (Wu et al. 2024), section 4, algorithm 3: each of the five load and store streams gets one of the
machine's threads, and the number for arithmetic is enumerated over the rest. Our passes run one product or attention at
a time on all of those, so there is nothing to divide between operators.
"""

from dataclasses import replace

from engines.planning.machine import faster
from harness.api import HardwareLimits, HardwareProfile, Processor
from harness.common.curve import interpolate

#: Loads of weights, cache and activations; stores of cache and activations.
_STREAMS = 5
#: Rates closer than this count as equal; the fewest threads win.
_ALIKE = 0.01


def compute_threads(profile: HardwareProfile) -> int | None:
    """The number of threads that computes fastest beside the streams.

    None if the machine has too few threads to divide, or no rates by thread count.
    """
    host = profile.host
    if host.cores <= _STREAMS or not host.by_threads:
        return None
    rates = {count: interpolate(host.by_threads, count) for count in range(1, host.cores - _STREAMS + 1)}
    most = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= (1 - _ALIKE) * most)


def on_threads(host: Processor, count: int) -> Processor:
    """The host computing on `count` threads: everything, attention too, slows as products do."""
    if count >= host.cores or not host.by_threads:
        return host
    share = interpolate(host.by_threads, count) / interpolate(host.by_threads, host.cores)
    return replace(
        faster(host, share), attention={bits: share * rate for bits, rate in host.attention.items()}, cores=count
    )


def limited(profile: HardwareProfile, limits: HardwareLimits) -> HardwareProfile:
    """The machine under a cell's limits. A measured host's device counts only if the limits grant its memory."""
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
