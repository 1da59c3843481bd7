"""Predicts a suite's cell on a machine that is not here, as the record of a run; and searches a cell's policy."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from engines.models.shapes import shape as shape_of
from engines.offload.scheduler import steady_blocks
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.host_planner import HostPlanner
from engines.planning.pipeline import planner_for
from engines.planning.plan import shortage
from engines.planning.search import ALL_BITS, SearchSpace, search
from engines.planning.threads import compute_threads, limited
from engines.planning.workload import Lengths, mean_lengths, model_weight_bytes
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
    Status,
)

#: The largest batch that `tune: max_batch` tries, and the most requests that are simulated.
_MAX_BATCH, _MAX_SIMULATED = 4096, 4096
#: Trace metrics that are ratios, not sums over passes.
_RATIOS = ("rows_per_pass", "disk_hidden")


def simulate(spec: RunSpec, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunRecord:
    """The prediction for one cell. `lengths`: prompt and generated tokens of its requests, if they differ.

    A cell without a performance model, or that the model does not take, is skipped with the reason.
    """
    try:
        shape = shape_of(spec.model.id)
        engine_cost_model(spec.engine)
        job = spec.workload
        if job.kind == "task":
            raise HarnessError(f"task {job.task}: the lengths of its examples are not known before they are read")
        if job.prompt_len + job.gen_len > shape.max_context:
            raise HarnessError(f"prompt {job.prompt_len} + {job.gen_len} new tokens exceed the model's context of "
                               f"{shape.max_context}")  # fmt: skip
        dtype: Dtype = "bfloat16" if spec.model.dtype == "auto" else spec.model.dtype
        return _Cell(spec, shape, limited(profile, spec.limits), lengths, dtype).record()
    except HarnessError as exc:
        status: Status = "infeasible" if isinstance(exc, InfeasibleError) else "skipped"
        return RunRecord(spec, "", 0, status, str(exc), simulated=True)


def search_policy(
    spec: RunSpec, model: LocalModel, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]
) -> RunSpec:
    """The cell with the best policy for it. Our engine keeps deciding where weights go.

    Raises HarnessError for what cannot be planned, InfeasibleError if nothing fits.
    """
    dtype = spec.policy.compute_dtype
    if dtype not in ("auto", profile.host.dtype):
        # the rates stay those of the profile's dtype, which hardly changes what is best; memory is this dtype's
        profile = replace(profile, host=replace(profile.host, dtype=cast(Dtype, dtype)))
    if spec.limits.device_memory is not None and profile.device is None:
        raise HarnessError(
            f"hardware {profile.name} has no device to search for: run harness calibrate where there is one"
        )
    host_attention = profile.device is None or not _has_sliding_window(model)
    cell = _Cell(spec, model.shape, limited(profile, spec.limits), lengths, model.dtype, host_attention)
    best = cell.best()
    if profile.device is not None and spec.engine == "offload":  # the engine places weights by what it measures
        cache = best.cache if best.cpu_attention else spec.policy.cache
        best = replace(best, weights=spec.policy.weights, activations=None, cache=cache)
    return replace(spec, policy=best, tune="none")


def _has_sliding_window(model: LocalModel) -> bool:
    """Whether the model's configuration sets a sliding window, which the host's attention beside a device lacks."""
    config = Path(model.path) / "config.json"
    return bool(model.path) and bool(json.loads(config.read_text()).get("sliding_window"))


class _Cell:
    """One cell on one machine. `host_attention`: a search may let the host attend beside a device."""

    def __init__(
        self, spec: RunSpec, shape: ModelShape, profile: HardwareProfile, lengths: Sequence[tuple[int, int]],
        dtype: Dtype, host_attention: bool = True,
    ) -> None:  # fmt: skip
        self._attention = (False, True) if host_attention else (False,)
        self._spec = spec
        self._shape = shape
        self._profile = profile
        self._dtype = dtype
        job = spec.workload
        self._each = [Lengths(*pair) for pair in lengths] or [Lengths(job.prompt_len, job.gen_len)]
        mean = mean_lengths(self._each)
        self._planner: ClosedFormPlanner | HostPlanner
        # a limit is all for the engine; without one the system needs its part
        budget = profile.host.memory if spec.limits.host_memory is not None else None
        reserved = job.prompt_len + job.gen_len
        if profile.device is None:
            if spec.engine != "offload":
                raise HarnessError(f"hardware {profile.name} has no device: only offload is predicted there")
            # so many requests of a longer job tell how long the others take
            most = max(_MAX_SIMULATED, spec.policy.block_size * steady_blocks(spec.policy))
            requests = None if job.num_requests == "auto" else min(job.num_requests, most)
            self._planner = HostPlanner(
                shape, mean, profile, requests, each=self._each, budget=budget, dtype=dtype, reserved=reserved
            )
        else:
            stages = max(1, profile.devices)
            if stages > 1 and spec.policy.schedule == "sweep":
                raise HarnessError(f"hardware {profile.name} has {stages} devices: a pipeline runs row or zigzag")
            self._planner = planner_for(
                shape, mean, profile, engine_cost_model(spec.engine), stages,
                each=self._each, dtype=dtype, budget=budget, reserved=reserved,
            )  # fmt: skip
        if spec.policy.schedule not in self._planner.engine.schedules:
            raise HarnessError(f"engine {spec.engine} has no schedule {spec.policy.schedule}")

    def record(self) -> RunRecord:
        """Raises InfeasibleError with the missing bytes."""
        policy = self._final_policy()
        prediction = self._planner.predict(policy)
        if missing := self._planner.missing(prediction):
            raise InfeasibleError(f"infeasible on {self._profile.name}: {shortage(missing)}", missing)
        spec, model = self._spec, self._model()
        budget = spec.limits.host_memory
        peak = MemoryLimit("predicted", 0, budget, budget, round(prediction.peak.host), True)
        return RunRecord(
            spec, "", 0, "ok", load=self._load(policy, model, prediction.together),
            metrics=self._metrics(policy, prediction), memory=peak,
            trace=prediction.trace.events if prediction.trace else (),
            bound=prediction.bound, model=model, simulated=True,
        )  # fmt: skip

    def _final_policy(self) -> OffloadPolicy:
        """The cell's policy after tuning, with all fractions."""
        spec, planner = self._spec, self._planner
        if spec.tune.startswith("search"):
            return planner.with_fractions(self.best())
        if spec.tune == "max_batch":
            return self._largest_batch()
        return planner.with_fractions(spec.policy)

    def best(self) -> OffloadPolicy:
        """The policy that the search finds for the cell's schedule. Raises InfeasibleError if none fits."""
        policy, latency_s = self._spec.policy, self._spec.latency_s
        requests = self._spec.workload.num_requests
        on_host = self._profile.device is None
        space = SearchSpace(
            schedules=[policy.schedule],
            bits=ALL_BITS if self._spec.tune == "search_bits" else ((policy.weight_bits, policy.kv_bits),),
            cpu_attention=(policy.cpu_attention,) if on_host else self._attention,
            latency_s=latency_s,
            requests=None if requests == "auto" else requests,
            base=replace(policy, threads=policy.threads or (compute_threads(self._profile) if on_host else None)),
        )
        best = search(self._planner, space).best
        if best is None:
            late = "" if latency_s is None else f", or ends within {latency_s:g} s"
            raise InfeasibleError(f"infeasible on {self._profile.name}: no batch fits{late}")
        return best.policy

    def _largest_batch(self) -> OffloadPolicy:
        """The policy with the largest batch that fits, in steps of a quarter, as a measured search takes them."""
        fitting = None
        size = 1
        while size <= _MAX_BATCH:
            try:
                policy = self._planner.with_fractions(replace(self._spec.policy, gpu_batch_size=size))
            except InfeasibleError:  # a planner of our engine raises here, with the numbers
                if fitting is None:
                    raise
                break
            missing = self._planner.missing(self._planner.predict(policy))
            if missing and fitting is None:
                raise InfeasibleError(
                    f"infeasible on {self._profile.name} even at batch 1: {shortage(missing)}", missing
                )
            if missing:
                break
            fitting = policy
            size += max(1, size // 4)
        assert fitting is not None
        return fitting

    def _model(self) -> LocalModel:
        nbytes = DTYPE_BYTES[self._dtype] * self._shape.params_total
        return LocalModel(self._spec.model.id, self._shape, nbytes, self._dtype, "")

    def _load(self, policy: OffloadPolicy, model: LocalModel, together: int) -> LoadReport:
        assert policy.weights is not None
        total = model_weight_bytes(self._shape, policy)
        device, host, disk = (int(fraction * total) for fraction in policy.weights)
        return LoadReport(
            vocab=self._shape.vocab,
            max_context=self._shape.max_context,
            block_size=together,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(device, host, disk),
            notes=(f"predicted for {self._profile.name}",),
        )

    def _metrics(self, policy: OffloadPolicy, prediction: Prediction) -> Mapping[str, float | None]:
        """Metrics of the job's requests; a sweep has no phases."""
        requests = self._spec.workload.num_requests
        count = prediction.together * steady_blocks(policy) if requests == "auto" else requests
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
