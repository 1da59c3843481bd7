"""Recomputes bounds from the machine's rates around each launch: a shared machine's speed varies by the minute."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from harness.api import MachineRates, RunRecord
from harness.common.roofline import bound_of
from reports.text import grouped

#: The longest gap between a launch and a later probe that still applies to it, seconds.
_MAX_GAP_S = 180.0


def with_rates_around(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The same records, with each bound recomputed from the probes before and after its launch.

    A probe precedes every launch, so the probe after a launch belongs to the next one. The best sample of a probe
    counts, since noise only slows it down; of two probes, their mean. A launch without a timely later probe on the same
    machine, with the same GEMM shape and threads, keeps its own bound.
    """
    records = list(records)
    probed = [(start, r) for r in records if r.machine and (start := _start_s(r)) is not None]
    probed.sort(key=lambda launch: launch[0])
    after: dict[int, MachineRates] = {}
    for by_time in grouped(probed, lambda launch: _probe_key(launch[1])).values():
        for (start, record), (next_start, following) in itertools.pairwise(by_time):
            if following.machine and next_start - start - record.wall_s < _MAX_GAP_S:
                after[id(record)] = following.machine
    return [_rebound(record, after.get(id(record))) for record in records]


def _rebound(record: RunRecord, after: MachineRates | None) -> RunRecord:
    if not (record.machine and after and record.bound):
        return record
    return replace(record, bound=bound_of(record, _mean_rates(record.machine, after)) or record.bound)


def _mean_rates(before: MachineRates, after: MachineRates) -> MachineRates:
    """The mean of two probes' best samples; a rate that one of them lacks comes from the other."""
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
    except (ValueError, OverflowError):  # a record may hold any text
        return None


def _probe_key(record: RunRecord) -> tuple[str, object, object]:
    """What two launches must share for their probes to be comparable."""
    host = json.dumps(record.provenance.get("machine"), sort_keys=True)
    return host, record.machine.gemm_shape if record.machine else None, record.spec.limits.threads
