"""Forecasts a measured launch: by the host's profile, corrected by the rates measured beside the launch."""

import statistics
from dataclasses import replace
from typing import cast

from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.machine import faster
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.threads import rank_share
from engines.planning.workload import Lengths
from harness.api import Dtype, Forecast, HardwareProfile, HarnessError, MachineRates, Processor, RunRecord
from harness.common.curve import interpolate
from harness.common.roofline import merged

#: Rows of the product that calibration and every launch measure.
_PROBED_ROWS = "256"


def forecast(record: RunRecord, profile: HardwareProfile) -> Forecast | None:
    """The prediction for a launch that ran without a device.

    It uses the profile, scaled by the rates measured before and after the launch; in another dtype than the profile's
    it uses those rates alone. None if they are missing. Raises HarnessError for what cannot be planned.
    """
    spec, model, load = record.spec, record.model, record.load
    assert model is not None
    assert load is not None
    if spec.workload.kind == "task":
        raise HarnessError("there is no model of tasks, whose examples share prefixes")
    if spec.policy.tensor > 1:
        raise HarnessError("there is no model of ranks that hold a part of every matrix")
    ranks = spec.policy.pipeline
    if ranks > 1 and spec.limits.threads is None:
        raise HarnessError("of several ranks limits.threads must say on how many each ran: rates were measured on all")
    if spec.limits.device_memory is not None:
        raise HarnessError("the model of launches on a device has not been compared with any launch")
    if profile.device is not None and not profile.host_id:
        raise HarnessError(f"hardware {profile.name} has a device, and the launch had none")
    at_launch, at_once = _profile_at_launch(profile, record, cast(Dtype, load.compute_dtype))
    if at_launch is None:
        return None
    policy = spec.policy if spec.tune == "none" else load.policy
    assert policy is not None
    each = [Lengths(r.prompt_tokens, r.generated_tokens) for r in record.requests]
    reserved = spec.workload.prompt_len + spec.workload.gen_len
    job = PlannedJob(model.shape, each, len(each), model.dtype, spec.limits.host_memory, reserved)
    planner = planner_for(job, at_launch, engine_cost_model("offload"), ranks, at_once, spec.limits.link)
    prediction = planner.predict(policy)
    assert prediction.trace is not None
    total = prediction.prefill_s + prediction.decode_s
    return Forecast(profile.name, prediction.throughput_tok_s, {"total_s": total, **prediction.trace.metrics})


def _profile_at_launch(
    profile: HardwareProfile, record: RunRecord, dtype: Dtype
) -> tuple[HardwareProfile | None, float]:
    """The machine under the launch's limits at the time, for arithmetic in `dtype`, or one rank's part of it; None if
    its rates are unknown. And how many ranks compute at full speed at a time.

    The disk's rate beside the launch is that of the whole disk, so limits apply after it; the arithmetic's is that of
    the launch's own threads, so it applies after the limits.
    """
    machine, disk = record.machine, profile.disk
    if machine is not None and record.machine_after is not None:
        machine = merged(machine, record.machine_after)
    if machine is not None and machine.disk_read:
        disk = replace(disk, read=statistics.median(machine.disk_read))
    profile, at_once = rank_share(replace(profile, disk=disk), record.spec.policy.pipeline, record.spec.limits)
    host = _host_at_launch(profile.host, machine, dtype)
    return None if host is None else replace(profile, host=host), at_once


def _host_at_launch(host: Processor, machine: MachineRates | None, dtype: Dtype) -> Processor | None:
    curve = machine.gemm_flops.get(dtype) if machine else None
    if machine is None or not curve:
        return host if dtype == host.dtype else None
    if dtype != host.dtype:
        flops = {rows: statistics.median(samples) for rows, samples in curve.items()}
        return replace(host, flops=flops, dtype=dtype)
    if not (host.probed and machine.gemm_shape and _PROBED_ROWS in curve):
        return host
    # the best samples, as in the profile: noise only slows arithmetic
    return faster(host, max(curve[_PROBED_ROWS]) / interpolate(host.probed, machine.gemm_shape[0]))
