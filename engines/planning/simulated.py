"""A cell of a suite on a machine that is not here: the same record as a run's, with predicted figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from engines.models.shapes import shape as shape_of
from engines.offload.scheduler import steady_blocks
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import ENGINE_COST_MODELS
from engines.planning.host_planner import HostPlanner
from engines.planning.pipeline import planner_for
from engines.planning.plan import shortage
from engines.planning.search import ALL_BITS, SearchSpace, search
from engines.planning.threads import allotted, limited
from engines.planning.workload import Lengths, mean, sublayers, weight_bytes
from harness.api import (
    DTYPE_BYTES,
    Dtype,
    HardwareProfile,
    HarnessError,
    InfeasibleError,
    LoadReport,
    LocalModel,
    MemoryLimit,
    ModelShape,
    OffloadPolicy,
    RunRecord,
    RunSpec,
)

#: The largest batch that is looked for, and the requests of a job that are run in virtual time.
_CEILING, _PLAYED = 4096, 4096
#: Figures of a trace that are no sums over its passes.
_RATIOS = ("rows_per_pass", "disk_hidden")


def simulate(spec: RunSpec, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunRecord:
    """One cell, predicted; `lengths`: prompt and generated tokens of its requests, where they differ.

    What has no model of its way of working, or of its size, is skipped with the reason.
    """
    try:
        shape = shape_of(spec.model.id)
        if spec.engine not in ENGINE_COST_MODELS:
            raise HarnessError(
                f"engine {spec.engine} has no performance model (those that have: {', '.join(ENGINE_COST_MODELS)})"
            )
        job = spec.workload
        if job.kind == "task":
            raise HarnessError(f"task {job.task}: the lengths of its examples are not known before they are read")
        if job.prompt_len + job.gen_len > shape.max_context:
            raise HarnessError(f"prompt {job.prompt_len} + {job.gen_len} new tokens exceed the model's context of "
                               f"{shape.max_context}")  # fmt: skip
        dtype: Dtype = "bfloat16" if spec.model.dtype == "auto" else spec.model.dtype
        return _Cell(spec, shape, limited(profile, spec.limits), lengths, dtype).record()
    except InfeasibleError as exc:
        return RunRecord(spec, "", 0, "infeasible", str(exc), simulated=True)
    except HarnessError as exc:
        return RunRecord(spec, "", 0, "skipped", str(exc), simulated=True)


def searched(spec: RunSpec, model: LocalModel, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunSpec:
    """The cell with the policy that is best for it; our engine itself places weights where there is room for them.

    Raises HarnessError for what cannot be planned, InfeasibleError where nothing fits.
    """
    asked = spec.policy.compute_dtype
    if asked not in ("auto", profile.host.dtype):
        # the rates are another dtype's, which changes what is best little; the memory is this one's
        profile = replace(profile, host=replace(profile.host, dtype=cast(Dtype, asked)))
    if spec.limits.device_memory is not None and profile.device is None:
        raise HarnessError(
            f"hardware {profile.name} has no device to search for: run harness calibrate where there is one"
        )
    windows = profile.device is not None and _may_have_windows(model)
    cell = _Cell(spec, model.shape, limited(profile, spec.limits), lengths, model.dtype, windows)
    best = cell.best()
    if profile.device is not None and spec.engine == "offload":  # with room by its own count
        cache = best.cache if best.cpu_attention else spec.policy.cache
        best = replace(best, weights=spec.policy.weights, activations=None, cache=cache)
    return replace(spec, policy=best, tune="none")


def _may_have_windows(model: LocalModel) -> bool:
    """Whether a configuration names a sliding window: in such layers the host does not attend beside a device."""
    config = Path(model.path) / "config.json"
    return bool(model.path) and bool(json.loads(config.read_text()).get("sliding_window"))


class _Cell:
    """One cell on one machine. `windows`: attention stays on the device."""

    def __init__(
        self, spec: RunSpec, shape: ModelShape, profile: HardwareProfile, ragged: Sequence[tuple[int, int]],
        dtype: Dtype, windows: bool = False,
    ) -> None:  # fmt: skip
        self._attention = (False,) if windows else (False, True)
        self._spec = spec
        self._shape = shape
        self._profile = profile
        self._dtype = dtype
        job = spec.workload
        self._each = [Lengths(*one) for one in ragged] or [Lengths(job.prompt_len, job.gen_len)]
        self._lengths = mean(self._each)
        self._planner: ClosedFormPlanner | HostPlanner
        # what the limit leaves is all for the model's work; without one the system needs some
        budget = profile.host.memory if spec.limits.host_memory is not None else None
        reserved = job.prompt_len + job.gen_len
        if profile.device is None:
            if spec.engine != "offload":
                raise HarnessError(f"hardware {profile.name} has no device: only offload is predicted there")
            # of a longer job so many are enough to tell what the others take
            most = max(_PLAYED, spec.policy.block_size * steady_blocks(spec.policy))
            requests = None if job.num_requests == "auto" else min(job.num_requests, most)
            self._planner = HostPlanner(
                shape, self._lengths, profile, requests, each=self._each, budget=budget, dtype=dtype, reserved=reserved
            )
        else:
            stages = max(1, profile.devices)
            if stages > 1 and spec.policy.schedule == "sweep":
                raise HarnessError(f"hardware {profile.name} has {stages} devices: a pipeline runs row or zigzag")
            self._planner = planner_for(
                shape, self._lengths, profile, spec.engine, stages,
                each=self._each, dtype=dtype, budget=budget, reserved=reserved,
            )  # fmt: skip
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
            spec, "", 0, "ok", load=self._load(policy, model, prediction.together),
            metrics=self._metrics(policy, prediction), memory=peak,
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
        asked, latency_s = self._spec.workload.num_requests, self._spec.latency_s
        wanted = SearchSpace(
            schedules=[policy.schedule],
            bits=ALL_BITS if self._spec.tune == "search_bits" else own,
            cpu_attention=(policy.cpu_attention,) if self._profile.device is None else self._attention,
            latency_s=latency_s,
            requests=None if asked == "auto" else asked,
            base=replace(policy, threads=policy.threads or (None if self._profile.device else allotted(self._profile))),
        )
        found = search(self._planner, wanted).best
        if found is None:
            late = "" if latency_s is None else f", or ends within {latency_s:g} s"
            raise InfeasibleError(f"infeasible on {self._profile.name}: no batch fits{late}")
        return found.policy

    def _largest(self) -> OffloadPolicy:
        """With the largest batch that fits, in steps of a quarter at most, as a measured search finds it."""
        fitting = None
        size = 1
        while size <= _CEILING:
            try:
                policy = self._planner.placed(replace(self._spec.policy, gpu_batch_size=size))
            except InfeasibleError:  # as the engine says it, where it places
                if fitting is None:
                    raise
                break
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
        nbytes = DTYPE_BYTES[self._dtype] * self._shape.params_total
        return LocalModel(self._spec.model.id, self._shape, nbytes, self._dtype, "")

    def _load(self, policy: OffloadPolicy, model: LocalModel, together: int) -> LoadReport:
        assert policy.weights is not None
        whole = sum(weight_bytes(part, policy) * part.count for part in sublayers(self._shape))
        by_tier = tuple(int(part * whole) for part in policy.weights)
        return LoadReport(
            vocab=self._shape.vocab,
            max_context=self._shape.max_context,
            block_size=together,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(by_tier[0], by_tier[1], by_tier[2]),
            notes=(f"predicted for {self._profile.name}",),
        )

    def _metrics(self, policy: OffloadPolicy, prediction: Prediction) -> Mapping[str, float | None]:
        """Of as many requests as are asked for; a sweep has no phases."""
        asked = self._spec.workload.num_requests
        count = prediction.together * steady_blocks(policy) if asked == "auto" else asked
        each = list(itertools.islice(itertools.cycle(self._each), count))
        prompts, generated = sum(r.prompt for r in each), sum(r.generated for r in each)
        total = generated / prediction.throughput_tok_s
        blocks = count / prediction.requests
        phased = policy.schedule != "sweep"
        decoded = (generated - count) / blocks
        return {
            "generation_throughput_tok_s": prediction.throughput_tok_s,
            "decode_throughput_tok_s": decoded / prediction.decode_s if phased and decoded else None,
            "total_throughput_tok_s": (prompts + generated) / total,
            "total_s": total,
            "prefill_s": blocks * prediction.prefill_s if phased else None,
            "decode_s": blocks * prediction.decode_s if phased else None,
            "block_latency_s": prediction.block_latency_s,
            "num_requests": float(count),
            "prompt_tokens": float(prompts),
            "generated_tokens": float(generated),
            "padding_tokens": 0.0,
            **{f"{name}_busy_s": blocks * seconds for name, seconds in prediction.used.items()},
            **{
                name: value if name in _RATIOS else blocks * value
                for name, value in (prediction.trace.metrics if prediction.trace else {}).items()
            },
        }
