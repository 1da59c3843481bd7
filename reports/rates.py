"""Bounds by the best rates a machine has shown: a probe beside one launch may have met it in a slow minute."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from harness.api import HardwareProfile, RunRecord, roofline


def with_best_rates(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The same records, each bound computed anew from the samples of all probes of its machine among them.

    A bound is what a machine can do, and noise only slows: the more samples, the truer. Rates of the disk are shared
    by all records of a machine, those of products by those of one shape and number of threads.
    """
    records = list(records)
    disk: dict[str, list[float]] = {}
    products: dict[tuple[str, object, object], dict[str, dict[str, tuple[float, ...]]]] = {}
    for record in records:
        if record.machine:
            disk.setdefault(_host(record), []).extend(record.machine.disk_read)
            curves = products.setdefault(_products(record), {})
            for dtype, curve in record.machine.gemm_flops.items():
                merged = curves.setdefault(dtype, {})
                for rows, samples in curve.items():
                    merged[rows] = (*merged.get(rows, ()), *samples)

    def rebound(record: RunRecord) -> RunRecord:
        spec, load, model = record.spec, record.load, record.model
        if not (record.machine and record.bound and load and model):
            return record
        best = HardwareProfile(tuple(disk[_host(record)]), record.machine.gemm_shape, products[_products(record)])
        found = roofline(
            model,
            spec.workload,
            load.block_size,
            load.compute_dtype,
            spec.limits.host_memory,
            best,
            spec.policy.kv_bits,
        )
        return replace(record, bound=found or record.bound)

    return [rebound(record) for record in records]


def _host(record: RunRecord) -> str:
    return json.dumps(record.provenance.get("machine"), sort_keys=True)


def _products(record: RunRecord) -> tuple[str, object, object]:
    return _host(record), record.machine.gemm_shape if record.machine else None, record.spec.limits.threads
