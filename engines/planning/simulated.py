"""Predicts a suite's cell on a machine that is not here, as the record of a run; and searches a cell's policy."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from engines.offload.prefill_budget import steady_blocks
from engines.planning.accuracy_costs import accuracy_cost
from engines.planning.closed_form_planner import Prediction, require_modelled
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.plan import shortage
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.search import ALL_BITS, SearchSpace, search
from engines.planning.thread_control import policy_threads
from engines.planning.threads import limited, rank_share
from engines.planning.workload import Lengths, model_weight_bytes
from harness import api
from harness.api import services
from harness.common.accuracy_words import accuracy_words
from harness.common.regular_file import read_json

#: The most requests that are simulated.
_MAX_SIMULATED = 4096
#: Trace metrics that are ratios, not sums over passes.
_RATIOS = ("rows_per_pass", "disk_hidden")


def simulate(
    spec: api.RunSpec, profile: api.HardwareProfile, lengths: Sequence[tuple[int, int]], describe: services.Describe
) -> api.RunRecord:
    """The prediction for one cell. `lengths`: prompt and generated tokens of its requests, if they differ.

    A cell without a performance model, or that the model does not take, is skipped with the reason.
    """
    try:
        engine_cost_model(spec.engine)
        job = spec.workload
        if job.kind == "task":
            raise api.HarnessError(f"task {job.task}: the lengths of its examples are not known before they are read")
        described = describe(spec.engine, spec.model)
        shape = described.shape
        if job.prompt_len + job.gen_len > shape.max_context:
            raise api.HarnessError(f"prompt {job.prompt_len} + {job.gen_len} new tokens exceed the model's context of "
                               f"{shape.max_context}")  # fmt: skip
        dtype = described.dtype
        model = api.LocalModel(spec.model.id, shape, api.DTYPE_BYTES[dtype] * shape.params_total, dtype, "")
        cell = _Cell(spec, model, profile, lengths, caveats=described.caveats)
        return cell.record()
    except api.HarnessError as exc:
        status: api.Status = "infeasible" if isinstance(exc, api.InfeasibleError) else "skipped"
        return api.RunRecord(spec, "", 0, status, str(exc), simulated=True)


def search_policy(
    spec: api.RunSpec, model: api.LocalModel, profile: api.HardwareProfile, lengths: Sequence[tuple[int, int]]
) -> api.RunSpec:
    """The cell with the best policy for it. Our engine keeps deciding where weights go.

    Raises HarnessError for what cannot be planned, InfeasibleError if nothing fits.
    """
    require_modelled(spec.policy)
    dtype = spec.policy.compute_dtype
    if dtype not in ("auto", profile.host.dtype):
        # the rates stay those of the profile's dtype, which hardly changes what is best; memory is this dtype's
        profile = replace(profile, host=replace(profile.host, dtype=cast(api.Dtype, dtype)))
    if spec.limits.device_memory is not None and profile.device is None:
        raise api.HarnessError(
            f"hardware {profile.name} has no device to search for: run harness calibrate where there is one"
        )
    host_attention = profile.device is None or not _has_sliding_window(model)
    cell = _Cell(spec, model, profile, lengths, host_attention)
    best = cell.best()
    if profile.device is not None and spec.engine == "offload":  # the engine places weights by what it measures
        chosen = best.cpu_attention or (best.schedule != "sweep" and best.cache is not None and best.cache[2] > 0)
        cache = best.cache if chosen else spec.policy.cache
        chunk = spec.policy.prefill_chunk
        best = replace(best, weights=spec.policy.weights, activations=None, cache=cache, prefill_chunk=chunk)
    return replace(spec, policy=best, tune="none")


def search_notes(tune: api.Tune, policy: api.OffloadPolicy) -> tuple[str, ...]:
    """What the bits cost in accuracy that a search has chosen; nothing where it chose none, or exact ones."""
    cost = accuracy_cost(policy) if tune == "search_bits" else None
    return () if cost is None else (accuracy_words(cost),)


def _has_sliding_window(model: api.LocalModel) -> bool:
    """Whether the model's configuration sets a sliding window, which the host's attention beside a device lacks."""
    config = Path(model.path) / "config.json"
    return bool(model.path) and bool(read_json(config).get("sliding_window"))


def _pipeline_notes(prediction: Prediction) -> tuple[str, ...]:
    """Which stage takes longest, and what limits it; nothing without stages."""
    use = prediction.pipeline
    if use is None:
        return ()
    slowest, limit = use.bottleneck
    idle = ", ".join(f"{stage.idle_share:.0%}" for stage in use.stages)
    words = api.RESOURCE_WORDS.get(limit, limit)
    return (f"{len(use.stages)} stages, groups under way: {use.groups}; stage {slowest + 1} takes longest, limited by "
            f"{words}; idle by stage: {idle}",)  # fmt: skip


class _Cell:
    """One cell on one machine. `host_attention`: a search may let the host attend beside a device. `caveats`: what the
    model of its model does not represent."""

    def __init__(
        self, spec: api.RunSpec, model: api.LocalModel, profile: api.HardwareProfile,
        lengths: Sequence[tuple[int, int]], host_attention: bool = True, caveats: Sequence[str] = (),
    ) -> None:  # fmt: skip
        whole, profile = profile, limited(profile, spec.limits)
        ranks: int = spec.policy.pipeline
        at_once: float | None = None
        if ranks > 1 and profile.device is None:
            profile, at_once = rank_share(whole, ranks, spec.limits)
        self._spec = spec
        self._model = model
        self._profile = profile
        self._caveats = caveats
        stages = ranks if ranks > 1 else max(1, profile.devices)
        if 1 < profile.devices < stages:
            raise api.HarnessError(f"hardware {profile.name} has {profile.devices} devices: too few for {stages} ranks")
        if stages > 1 and profile.device is not None and spec.policy.schedule == "sweep":
            raise api.HarnessError(f"hardware {profile.name} has devices, whose pipelines are planned in step: use row "
                                   "or zigzag")  # fmt: skip
        workload = spec.workload
        # so many requests of a longer job tell how long the others take
        most = max(_MAX_SIMULATED, spec.policy.block_size * steady_blocks(spec.policy))
        self._job = PlannedJob(
            model.shape,
            each=[Lengths(*pair) for pair in lengths] or [Lengths(workload.prompt_len, workload.gen_len)],
            requests=None if workload.num_requests == "auto" else min(workload.num_requests, most),
            dtype=model.dtype,
            # a limit is all for the engine; without one the system needs its part
            budget=None if spec.limits.host_memory is None else profile.host.memory,
            reserved=workload.prompt_len + workload.gen_len,
        )
        engine = engine_cost_model(spec.engine)
        self._planner = planner_for(self._job, profile, engine, stages, at_once, spec.limits.link)
        self._attention = (False, True) if host_attention and engine.host_attention else (False,)
        if spec.policy.schedule not in engine.schedules:
            raise api.HarnessError(f"engine {spec.engine} has no schedule {spec.policy.schedule}")
        bits = ALL_BITS if spec.tune == "search_bits" else ((spec.policy.weight_bits, spec.policy.kv_bits),)
        self._bits = engine.offered_bits(bits)

    def record(self) -> api.RunRecord:
        """Raises InfeasibleError with the missing bytes."""
        spec = self._spec
        if spec.tune == "max_batch":
            policy, prediction = self._largest_batch()
        else:
            policy, prediction = self._predicted(self.best() if spec.tune.startswith("search") else spec.policy)
        budget = spec.limits.host_memory
        return api.RunRecord(
            spec, "", 0, "ok",
            load=self._load(policy, prediction),
            metrics=self._metrics(policy, prediction),
            memory=api.MemoryLimit("predicted", 0, budget, budget, round(prediction.peak.host), True),
            trace=prediction.trace.events if prediction.trace else (),
            bound=prediction.bound,
            model=self._model,
            simulated=True,
        )  # fmt: skip

    def _predicted(self, policy: api.OffloadPolicy, note: str = "") -> tuple[api.OffloadPolicy, Prediction]:
        """The policy with all fractions, and its prediction. Raises InfeasibleError with the missing bytes."""
        policy = self._planner.with_fractions(policy)
        prediction = self._planner.predict(policy)
        if missing := self._planner.missing(prediction):
            raise api.InfeasibleError(f"infeasible on {self._profile.name}{note}: {shortage(missing)}", missing)
        return policy, prediction

    def best(self) -> api.OffloadPolicy:
        """The policy that the search finds for the cell's schedule. Raises InfeasibleError if none fits."""
        policy, latency_s = self._spec.policy, self._spec.latency_s
        requests = self._spec.workload.num_requests
        on_host = self._profile.device is None
        space = SearchSpace(
            schedules=[policy.schedule],
            bits=self._bits,
            cpu_attention=(policy.cpu_attention,) if on_host else self._attention,
            latency_s=latency_s,
            requests=None if requests == "auto" else requests,
            base=replace(policy, threads=policy.threads or policy_threads(self._profile, self._planner.engine)),
        )
        best = search(self._planner, space).best
        if best is None:
            late = "" if latency_s is None else f", or ends within {latency_s:g} s"
            raise api.InfeasibleError(f"infeasible on {self._profile.name}: no batch fits{late}")
        return best.policy

    def _largest_batch(self) -> tuple[api.OffloadPolicy, Prediction]:
        """As _predicted, of the largest of the planner's batch sizes that fits."""
        first, *larger = self._planner.batch_sizes
        fitting = self._predicted(replace(self._spec.policy, gpu_batch_size=first), f" even at batch {first}")
        with suppress(api.InfeasibleError):
            for size in larger:
                fitting = self._predicted(replace(self._spec.policy, gpu_batch_size=size))
        return fitting

    def _load(self, policy: api.OffloadPolicy, prediction: Prediction) -> api.LoadReport:
        shape = self._model.shape
        assert policy.weights is not None
        total = model_weight_bytes(shape, policy)
        device, host, disk = (int(fraction * total) for fraction in policy.weights)
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=prediction.together,
            policy=policy,
            compute_dtype=self._model.dtype,
            weights_by_tier=(device, host, disk),
            notes=(
                f"predicted for {self._profile.name}",
                *_pipeline_notes(prediction),
                *search_notes(self._spec.tune, policy),
                *self._caveats,
            ),
        )

    def _metrics(self, policy: api.OffloadPolicy, prediction: Prediction) -> Mapping[str, float | None]:
        """Metrics of the job's requests; a sweep has no phases."""
        requests = self._spec.workload.num_requests
        count = prediction.together * steady_blocks(policy) if requests == "auto" else requests
        each = list(itertools.islice(itertools.cycle(self._job.each), count))
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
            **self._profile.prices.metrics(prediction.throughput_tok_s),
            "padding_tokens": 0.0,
            **{f"{name}_busy_s": blocks * seconds for name, seconds in prediction.used.items()},
            **{
                name: value if name in _RATIOS or name.endswith("_share") else blocks * value
                for name, value in (prediction.trace.metrics if prediction.trace else {}).items()
            },
        }
