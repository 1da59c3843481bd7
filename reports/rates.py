"""Bounds by what the machine could do around a launch: a shared one is faster in one minute than in another."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from harness.api import MachineRates, RunRecord
from harness.common.roofline import bound_of

#: A probe that began later than this after a launch says nothing of it.
_SOON_S = 180.0


def with_rates_around(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The same records, each bound computed anew from the probes on both sides of its launch.

    Before every launch the machine is probed, so the probe after a launch is the next one's. Of a probe's samples
    the best counts, as noise only slows; of the two probes the mean. A launch that none follows soon on the same
    machine, with products of the same shape and number of threads, has only its own.
    """
    records = list(records)
    probed: dict[tuple[str, object, object], list[tuple[float, RunRecord]]] = {}
    for record in records:
        if record.machine and (start := _start_s(record)) is not None:
            probed.setdefault(_products(record), []).append((start, record))
    after: dict[int, MachineRates] = {}
    for sharing in probed.values():
        in_time = sorted(sharing, key=lambda found: found[0])
        for (start, record), (next_start, following) in itertools.pairwise(in_time):
            if following.machine and next_start - start - record.wall_s < _SOON_S:
                after[id(record)] = following.machine
    return [_rebound(record, after.get(id(record))) for record in records]


def _rebound(record: RunRecord, after: MachineRates | None) -> RunRecord:
    before = record.machine
    if not (before and after and record.bound):
        return record
    found = bound_of(record, _between(before, after))
    return replace(record, bound=found or record.bound)


def _between(before: MachineRates, after: MachineRates) -> MachineRates:
    """The mean of two probes, by the best samples of each; what one of them lacks is the other's."""
    products = {
        dtype: {
            rows: _mean_of_best(samples, after.gemm_flops.get(dtype, {}).get(rows, ()))
            for rows, samples in curve.items()
        }
        for dtype, curve in before.gemm_flops.items()
    }
    return MachineRates(_mean_of_best(before.disk_read, after.disk_read), before.gemm_shape, products)


def _mean_of_best(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    best = [max(samples) for samples in (a, b) if samples]
    return (sum(best) / len(best),) if best else ()


def _start_s(record: RunRecord) -> float | None:
    try:
        return datetime.fromisoformat(record.started_at).timestamp()
    except (ValueError, OverflowError):  # records come from files
        return None


def _products(record: RunRecord) -> tuple[str, object, object]:
    host = json.dumps(record.provenance.get("machine"), sort_keys=True)
    return host, record.machine.gemm_shape if record.machine else None, record.spec.limits.threads
