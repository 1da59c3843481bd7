"""How many threads compute, and what a host computes on fewer than all.

Source: LM-Offload (Wu et al. 2024), section 4, algorithm 3: of as many threads as there are, each of the five streams
of loads and stores gets one, and the number for arithmetic is enumerated over what is left. Our passes run one
product or attention at a time, so all of the others work on it: there is nothing to divide between operators.
"""

from __future__ import annotations

from dataclasses import replace

from harness.api import HardwareProfile, Processor, interpolate

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
    """A host that computes on so many threads."""
    if count >= host.cores or not host.by_threads:
        return host
    share = _rate(host, count) / _rate(host, host.cores)
    return replace(host, flops={rows: share * rate for rows, rate in host.flops.items()}, cores=count)


def _rate(host: Processor, count: int) -> float:
    return interpolate(sorted((float(at), rate) for at, rate in host.by_threads.items()), count)
