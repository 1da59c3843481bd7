"""Recomputes bounds from the machine's rates around each launch: a shared machine's speed varies by the minute."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from harness.api import MachineRates, RunRecord
from harness.common.roofline import bounds_of, merged
from reports.records import workload_of
from reports.text import grouped


def with_rates_around(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The same records, with both bounds recomputed from the probes before and after the launch, whose best samples
    count: noise only slows a probe down.

    A record without a probe after its launch takes that before the next launch on the same machine, with the same GEMM
    shape and threads. Cells of one workload stand for one job, of as many requests as the largest of them had.
    """
    records = list(records)
    requests = {job: max(len(r.requests) for r in alike) for job, alike in grouped(records, workload_of).items()}
    probed = [(start, r) for r in records if r.machine and (start := _start_s(r)) is not None]
    probed.sort(key=lambda launch: launch[0])
    following: dict[int, MachineRates | None] = {}
    for by_time in grouped(probed, lambda launch: _probe_key(launch[1])).values():
        following |= {id(record): later.machine for (_, record), (_, later) in itertools.pairwise(by_time)}
    return [_rebound(r, r.machine_after or following.get(id(r)), requests[workload_of(r)]) for r in records]


def _rebound(record: RunRecord, after: MachineRates | None, requests: int) -> RunRecord:
    if not (record.machine and record.bound):
        return record
    bound, job = bounds_of(record, merged(record.machine, after) if after else record.machine, requests)
    return replace(record, bound=bound or record.bound, job_bound=job or record.job_bound)


def _start_s(record: RunRecord) -> float | None:
    try:
        return datetime.fromisoformat(record.started_at).timestamp()
    except (ValueError, OverflowError):  # a record may hold any text
        return None


def _probe_key(record: RunRecord) -> tuple[str, object, object]:
    """What two launches must share for their probes to be comparable."""
    host = json.dumps(record.provenance.get("machine"), sort_keys=True)
    return host, record.machine.gemm_shape if record.machine else None, record.spec.limits.threads
