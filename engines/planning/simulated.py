"""A cell of a suite on a machine that is not here: the same record as a run's, with predicted figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from engines.planning.host_only import HostPlanner
from engines.planning.pipeline import planner_for
from engines.planning.plan import shortage
from engines.planning.predict import Planner, Prediction
from engines.planning.search import ALL_BITS, Wanted, search
from engines.planning.style import STYLES
from engines.planning.threads import allotted, on_threads
from engines.planning.work import Lengths, parts, weight_bytes
from engines.shapes import shape as shape_of
from harness.api import (
    Dtype,
    Forecast,
    HardwareLimits,
    HardwareProfile,
    HarnessError,
    InfeasibleError,
    LoadReport,
    LocalModel,
    MachineRates,
    MemoryLimit,
    ModelShape,
    OffloadPolicy,
    Processor,
    RunRecord,
    RunSpec,
)

#: The largest batch that is looked for.
_CEILING = 4096
#: Rows of the product that is measured both in calibration and beside launches.
_PROBED_ROWS = "256"


def simulate(spec: RunSpec, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunRecord:
    """One cell, predicted; `lengths`: prompt and generated tokens of its requests, where they differ.

    What has no model of its way of working, or of its size, is skipped with the reason.
    """
    try:
        shape = shape_of(spec.model.id)
        if spec.engine not in STYLES:
            raise HarnessError(f"engine {spec.engine} has no performance model (those that have: {', '.join(STYLES)})")
        job = spec.workload
        if job.prompt_len + job.gen_len > shape.max_context:
            raise HarnessError(f"prompt {job.prompt_len} + {job.gen_len} new tokens exceed the model's context of "
                               f"{shape.max_context}")  # fmt: skip
        return _Cell(spec, shape, limited(profile, spec.limits), lengths).record()
    except InfeasibleError as exc:
        return RunRecord(spec, "", 0, "infeasible", str(exc), simulated=True)
    except HarnessError as exc:
        return RunRecord(spec, "", 0, "skipped", str(exc), simulated=True)


def searched(spec: RunSpec, shape: ModelShape, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunSpec:
    """The cell with the policy that is best for it; on a CPU the engine itself keeps what is left over of weights.

    Raises HarnessError for what cannot be planned, InfeasibleError where nothing fits.
    """
    cell = _Cell(spec, shape, limited(profile, spec.limits), lengths)
    return replace(spec, policy=cell.best(), tune="none")


def forecast(record: RunRecord, profile: HardwareProfile) -> Forecast | None:
    """What the model says of a launch on a machine without a device, in the dtype in which it computed.

    From the profile, brought to the minute of the launch by the rates measured beside it; those alone where the dtype
    is not the profile's, and None where there are none either. Raises HarnessError for what cannot be planned.
    """
    spec, model, load = record.spec, record.model, record.load
    assert model is not None
    assert load is not None
    known = _at_the_time(profile, record.machine, cast(Dtype, load.compute_dtype))
    if known is None:
        return None
    policy = spec.policy if spec.tune == "none" else load.policy
    assert policy is not None
    each = [Lengths(r.prompt_tokens, r.generated_tokens) for r in record.requests]
    limits, budget = limited(known, spec.limits), spec.limits.host_memory
    planner = HostPlanner(model.shape, _mean(each), limits, each, budget, model.dtype)
    prediction = planner.predict(policy)
    assert prediction.trace is not None
    total = prediction.prefill_s + prediction.decode_s
    return Forecast(profile.name, prediction.throughput_tok_s, {"total_s": total, **prediction.trace.metrics})


def _at_the_time(profile: HardwareProfile, machine: MachineRates | None, dtype: Dtype) -> HardwareProfile | None:
    """The profile as its machine was when `machine` was measured, for arithmetic in `dtype`; None where unknown."""
    host, disk = profile.host, profile.disk
    curve = machine.gemm_flops.get(dtype) if machine else None
    if machine is not None and machine.disk_read:
        disk = replace(disk, read=statistics.median(machine.disk_read))
    if dtype != host.dtype:
        if not curve:
            return None
        flops = {rows: statistics.median(samples) for rows, samples in curve.items()}
        host = replace(host, flops=flops, dtype=dtype)
    elif curve and host.probed and _PROBED_ROWS in curve:
        host = _faster(host, statistics.median(curve[_PROBED_ROWS]) / host.probed)
    return replace(profile, host=host, disk=disk)


def _faster(host: Processor, times: float) -> Processor:
    """A host whose cores do so many times as much in a second."""

    def scaled(curve: Mapping[str, float]) -> dict[str, float]:
        return {at: times * rate for at, rate in curve.items()}

    return replace(
        host,
        flops=scaled(host.flops),
        prompts=scaled(host.prompts),
        cached=scaled(host.cached),
        dequantize=host.dequantize and times * host.dequantize,
        elementwise=host.elementwise and times * host.elementwise,
        layer_call_s=host.layer_call_s and host.layer_call_s / times,
    )


def _mean(each: Sequence[Lengths]) -> Lengths:
    """Rounded to whole tokens."""
    prompt, generated = (statistics.mean(of) for of in ([r.prompt for r in each], [r.generated for r in each]))
    return Lengths(max(1, round(prompt)), max(1, round(generated)))


def limited(profile: HardwareProfile, limits: HardwareLimits) -> HardwareProfile:
    """The machine as a cell may use it."""
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


class _Cell:
    """One cell on one machine."""

    def __init__(
        self, spec: RunSpec, shape: ModelShape, profile: HardwareProfile, ragged: Sequence[tuple[int, int]]
    ) -> None:
        self._spec = spec
        self._shape = shape
        self._profile = profile
        each = [Lengths(*one) for one in ragged]
        self._lengths = _mean(each) if each else Lengths(spec.workload.prompt_len, spec.workload.gen_len)
        self._planner: Planner | HostPlanner
        if profile.device is None:
            if spec.engine != "offload":
                raise HarnessError(f"hardware {profile.name} has no device: only offload is predicted there")
            asked = spec.workload.num_requests
            # what the limit leaves is all for the model's work; without one the system needs some
            budget = profile.host.memory if spec.limits.host_memory is not None else None
            requests = None if asked == "auto" else each or asked
            self._planner = HostPlanner(shape, self._lengths, profile, requests, budget)
        else:
            stages = max(1, profile.devices)
            if stages > 1 and spec.policy.schedule == "sweep":
                raise HarnessError(f"hardware {profile.name} has {stages} devices: a pipeline runs row or zigzag")
            self._planner = planner_for(shape, self._lengths, profile, spec.engine, stages)
        if spec.policy.schedule not in self._planner.style.schedules:
            raise HarnessError(f"engine {spec.engine} has no schedule {spec.policy.schedule}")

    def record(self) -> RunRecord:
        """Raises InfeasibleError with the bytes that are lacking."""
        policy = self._settled()
        prediction = self._planner.predict(policy)
        if lacking := self._planner.lacking(prediction):
            raise InfeasibleError(f"infeasible on {self._profile.name}: {shortage(lacking)}", lacking)
        spec, model = self._spec, self._model()
        budget = spec.limits.host_memory
        peak = MemoryLimit("predicted", 0, budget, budget, round(prediction.peak.host), True)
        return RunRecord(
            spec, "", 0, "ok", load=self._load(policy, model), metrics=self._metrics(policy, prediction), memory=peak,
            trace=prediction.trace.events if prediction.trace else (),
            bound=prediction.bound, model=model, simulated=True,
        )  # fmt: skip

    def _settled(self) -> OffloadPolicy:
        """The cell's policy with its batch and all its fractions."""
        spec, planner = self._spec, self._planner
        if spec.tune.startswith("search"):
            return planner.placed(self.best())
        if spec.tune == "max_batch":
            return self._largest()
        return planner.placed(spec.policy)

    def best(self) -> OffloadPolicy:
        """The policy that the search finds in the cell's order. Raises InfeasibleError where none fits."""
        policy = self._spec.policy
        own = ((policy.weight_bits, policy.kv_bits),)
        bits = ALL_BITS if self._spec.tune == "search_bits" else own
        attention = (policy.cpu_attention,) if self._profile.device is None else (False, True)
        latency_s = self._spec.latency_s
        threads = policy.threads or (None if self._profile.device else allotted(self._profile))
        asked = self._spec.workload.num_requests
        requests = None if asked == "auto" else asked
        found = search(self._planner, Wanted([policy.schedule], bits, attention, latency_s, threads, requests)).best
        if found is None:
            late = "" if latency_s is None else f", or ends within {latency_s:g} s"
            raise InfeasibleError(f"infeasible on {self._profile.name}: no batch fits{late}")
        return found.policy

    def _largest(self) -> OffloadPolicy:
        """With the largest batch that fits, in steps of a quarter at most, as a measured search finds it."""
        fitting = None
        size = 1
        while size <= _CEILING:
            policy = self._planner.placed(replace(self._spec.policy, gpu_batch_size=size))
            if self._planner.lacking(self._planner.predict(policy)):
                break
            fitting = policy
            size += max(1, size // 4)
        if fitting is None:
            one = self._planner.placed(replace(self._spec.policy, gpu_batch_size=1))
            lacking = self._planner.lacking(self._planner.predict(one))
            raise InfeasibleError(f"infeasible on {self._profile.name} even at batch 1: {shortage(lacking)}", lacking)
        return fitting

    def _model(self) -> LocalModel:
        dtype = "float16" if self._spec.model.dtype == "auto" else self._spec.model.dtype
        return LocalModel(self._spec.model.id, self._shape, 2 * self._shape.params_total, dtype, "")

    def _load(self, policy: OffloadPolicy, model: LocalModel) -> LoadReport:
        assert policy.weights is not None
        whole = sum(weight_bytes(part, policy) * part.count for part in parts(self._shape))
        by_tier = tuple(int(part * whole) for part in policy.weights)
        return LoadReport(
            vocab=self._shape.vocab,
            max_context=self._shape.max_context,
            block_size=policy.block_size,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(by_tier[0], by_tier[1], by_tier[2]),
            notes=(f"predicted for {self._profile.name}",),
        )

    def _metrics(self, policy: OffloadPolicy, prediction: Prediction) -> Mapping[str, float | None]:
        """Of whole blocks; a sweep has no phases."""
        job, asked = self._lengths, self._spec.workload.num_requests
        count = policy.block_size if asked == "auto" else asked
        generated, total = count * job.generated, count * job.generated / prediction.throughput_tok_s
        blocks = count / policy.block_size
        phased = policy.schedule != "sweep"
        decoded = policy.block_size * (job.generated - 1)
        return {
            "generation_throughput_tok_s": prediction.throughput_tok_s,
            "decode_throughput_tok_s": decoded / prediction.decode_s if phased and decoded else None,
            "total_throughput_tok_s": (count * job.prompt + generated) / total,
            "total_s": total,
            "prefill_s": blocks * prediction.prefill_s if phased else None,
            "decode_s": blocks * prediction.decode_s if phased else None,
            "block_latency_s": prediction.block_latency_s,
            "num_requests": float(count),
            "prompt_tokens": float(count * job.prompt),
            "generated_tokens": float(generated),
            "padding_tokens": 0.0,
            **{f"{name}_busy_s": blocks * seconds for name, seconds in prediction.used.items()},
            **(prediction.trace.metrics if prediction.trace else {}),
        }
