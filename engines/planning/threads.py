"""What limits leave of a machine: fewer threads, less memory, a slower disk."""

from collections.abc import Mapping
from dataclasses import replace

from engines.planning.machine import faster
from harness.api import HardwareLimits, HardwareProfile, Processor
from harness.common.curve import interpolate


def on_threads(host: Processor, count: int) -> Processor:
    """The host computing on `count` threads: everything slows as products do, and attention as measured if it was."""
    if count >= host.cores:
        return host
    if not host.by_threads:  # nobody measured fewer threads: each does its part
        return replace(scaled(host, count / host.cores), cores=count)

    def share(curve: Mapping[str, float]) -> float:
        return interpolate(curve, count) / interpolate(curve, host.cores)

    attends = share(host.attention_by_threads or host.by_threads)
    return replace(scaled(host, share(host.by_threads), attends), cores=count)


def scaled(host: Processor, factor: float, attention: float | None = None) -> Processor:
    """The host with all rates times `factor`, those of attention times `attention` if that is given."""
    attends = factor if attention is None else attention
    return replace(faster(host, factor), attention={bits: attends * rate for bits, rate in host.attention.items()})


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


def rank_share(profile: HardwareProfile, ranks: int, limits: HardwareLimits) -> tuple[HardwareProfile, float]:
    """What one of so many ranks has that share a machine, each under the limits of a cell; and how many of them can
    compute at full speed at a time. They divide its memory, its disk and, where the limits set no threads, its cores.
    """
    host, disk = profile.host, profile.disk
    part = replace(
        profile,
        host=replace(host, memory=host.memory / ranks),
        disk=replace(disk, capacity=disk.capacity / ranks, read=disk.read / ranks, write=disk.write / ranks),
    )
    threads = min(host.cores, limits.threads or max(1, host.cores // ranks))
    return limited(part, replace(limits, threads=threads)), host.cores / threads
