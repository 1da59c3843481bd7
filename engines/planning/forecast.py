"""What the model says of a launch that was measured: on the machine as it was in that minute, within its limits."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import cast

from engines.planning.host_planner import HostPlanner
from engines.planning.machine import faster
from engines.planning.threads import limited
from engines.planning.workload import Lengths, mean
from harness.api import Dtype, Forecast, HardwareProfile, HarnessError, MachineRates, Processor, RunRecord
from harness.common.curve import interpolate

#: Rows of the product that is measured both in calibration and beside launches.
_PROBED_ROWS = "256"


def forecast(record: RunRecord, profile: HardwareProfile) -> Forecast | None:
    """What the model says of a launch on a machine without a device, in the dtype in which it computed.

    From the profile, brought to the minute of the launch by the rates measured beside it; those alone where the dtype
    is not the profile's, and None where there are none either. Raises HarnessError for what cannot be planned.
    """
    spec, model, load = record.spec, record.model, record.load
    assert model is not None
    assert load is not None
    if spec.workload.kind == "task":
        raise HarnessError("of tasks, whose examples begin alike, there is no model")
    if spec.limits.device_memory is not None:
        raise HarnessError("of launches on a device there is no model that was held against any")
    if profile.device is not None and not profile.host_id:
        raise HarnessError(f"hardware {profile.name} has a device, and the launch had none")
    known = _at_the_time(profile, record, cast(Dtype, load.compute_dtype))
    if known is None:
        return None
    policy = spec.policy if spec.tune == "none" else load.policy
    assert policy is not None
    each = [Lengths(r.prompt_tokens, r.generated_tokens) for r in record.requests]
    planner = HostPlanner(
        model.shape, mean(each), known, len(each), each=each, budget=spec.limits.host_memory, dtype=model.dtype,
        reserved=spec.workload.prompt_len + spec.workload.gen_len,
    )  # fmt: skip
    prediction = planner.predict(policy)
    assert prediction.trace is not None
    total = prediction.prefill_s + prediction.decode_s
    return Forecast(profile.name, prediction.throughput_tok_s, {"total_s": total, **prediction.trace.metrics})


def _at_the_time(profile: HardwareProfile, record: RunRecord, dtype: Dtype) -> HardwareProfile | None:
    """What a launch had of the machine, for arithmetic in `dtype`; None where its rates are unknown.

    The rates beside the launch are of its own threads, so they come after its limits; the disk's are of all of it.
    """
    machine, disk = record.machine, profile.disk
    if machine is not None and machine.disk_read:
        disk = replace(disk, read=max(machine.disk_read))
    had = limited(replace(profile, disk=disk), record.spec.limits)
    host = _cores_at_the_time(had.host, machine, dtype)
    return None if host is None else replace(had, host=host)


def _cores_at_the_time(host: Processor, machine: MachineRates | None, dtype: Dtype) -> Processor | None:
    curve = machine.gemm_flops.get(dtype) if machine else None
    if machine is None or not curve:
        return host if dtype == host.dtype else None
    if dtype != host.dtype:
        flops = {rows: statistics.median(samples) for rows, samples in curve.items()}
        return replace(host, flops=flops, dtype=dtype)
    if not (host.probed and machine.gemm_shape and _PROBED_ROWS in curve):
        return host
    probed = sorted((float(columns), rate) for columns, rate in host.probed.items())
    # the best samples, as for bounds: noise only slows
    return faster(host, max(curve[_PROBED_ROWS]) / interpolate(probed, machine.gemm_shape[0]))
