"""What limits leave of a machine: fewer threads, less memory, a slower disk."""

from collections.abc import Mapping
from dataclasses import replace

from engines.planning.machine import faster
from harness.api import HardwareLimits, HardwareProfile, Processor
from harness.common.curve import interpolate


def on_threads(host: Processor, count: int) -> Processor:
    """The host computing on `count` threads: everything slows as products do, and attention as measured if it was."""
    if count >= host.cores or not host.by_threads:
        return host

    def share(curve: Mapping[str, float]) -> float:
        return interpolate(curve, count) / interpolate(curve, host.cores)

    attends = share(host.attention_by_threads or host.by_threads)
    attention = {bits: attends * rate for bits, rate in host.attention.items()}
    return replace(faster(host, share(host.by_threads)), attention=attention, cores=count)


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
