"""`harness plan`: a policy that can be run as it stands, or the numbers that say why there is none, as plain data."""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from engines.planning.accuracy_costs import accuracy_cost
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import EngineCostModel, engine_cost_model
from engines.planning.host_planner import HostPlanner
from engines.planning.measured_usage import measured_usage
from engines.planning.nanoflow import planned_pass
from engines.planning.planned_job import SYSTEM_BYTES, PlannedJob
from engines.planning.planners import planner_for
from engines.planning.prediction_errors import prediction_error
from engines.planning.search import ALL_BITS, Candidate, Report, SearchSpace, no_report, search
from engines.planning.thread_control import allot, policy_threads
from engines.planning.workload import Lengths
from harness.api import (
    Bits,
    HardwareProfile,
    HarnessError,
    InfeasibleError,
    ModelDescription,
    OffloadPolicy,
    Schedule,
)

#: Rejected alternatives that a plan lists.
_LISTED = 8
#: Figures of a prediction that a plan shows, beside peak memory and busy resources.
_FIGURES = ("throughput_tok_s", "prefill_s", "decode_s", "block_latency_s", "bottleneck", "fraction_of_roofline")
_KINDS = {"weights": "w", "cache": "c", "activations": "h"}
_TIERS = "gcd"


def plan(
    model: ModelDescription, prompt_len: int, gen_len: int, profile: HardwareProfile, engine: str, *,
    schedules: Sequence[Schedule], bits: Sequence[tuple[Bits, Bits]] | None, latency_s: float | None,
    policy: OffloadPolicy | None, stages: int | None, budget: int | None = None, report: Report = no_report,
    kept: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The plan: the best policy, or the prediction for a given one. `report` receives the search's progress.

    bits: of weights and cache, that the search may choose; None for all.
    stages: of a pipeline, a device each or else a host; None for what the policy says, or as many as the profile has
        devices.
    budget: bytes of host memory that are all the engine's, or each rank's; None for what the system leaves of the
        profile's.
    kept: the cache, which may hold how often a mixture's experts were used; None to take their use to be uniform.

    Raises HarnessError for what cannot be planned, and InfeasibleError with the bytes missing on each tier.
    """
    stages = _stages(stages, profile, policy)
    source, counts = measured_usage(model.id, model.shape, kept) if stages == 1 else ("", ())
    job = PlannedJob(model.shape, [Lengths(prompt_len, gen_len)], dtype=model.dtype, budget=budget, counts=counts)
    planner = _planner(job, model.id, profile, engine, stages)
    ranks = stages if profile.device is None else 1  # our engine's
    if policy is not None:
        if stages > 1 and profile.device and policy.schedule == "sweep":
            raise HarnessError("a pipeline of devices has batches in step: take schedule row or zigzag, not sweep")
        policy = replace(policy, pipeline=max(ranks, policy.pipeline))
        chosen, rejected = _given(planner, policy), []
        to_run = policy
    else:
        space = SearchSpace(
            schedules=_offered(planner.engine, schedules, stages > 1 and profile.device is not None),
            bits=planner.engine.offered_bits(ALL_BITS if bits is None else bits),
            cpu_attention=(False, True) if profile.device and planner.engine.host_attention else (False,),
            latency_s=latency_s,
            base=OffloadPolicy(threads=policy_threads(profile, planner.engine), pipeline=ranks),
        )
        result = search(planner, space, report)
        if result.best is None:
            raise _nothing_fits(planner, space)
        chosen = replace(result.best, policy=planner.with_fractions(result.best.policy))
        # our engine places by what it measures, as in a search of a cell
        ours, cache = engine == "offload", chosen.policy.cache if chosen.policy.cpu_attention else None
        left = replace(chosen.policy, weights=None, activations=None, cache=cache, prefill_chunk=None)
        # what holds all weights in one tier finds that tier by itself, and honours no fractions
        bare = replace(left, cache=None) if planner.engine.weight_tiers else chosen.policy
        to_run = left if ours else bare
        rejected = [_rejected(*item) for item in result.rejected[:_LISTED]]
    return {
        "model": model.id,
        "hardware": profile.name,
        "devices": profile.devices,
        "stages": stages,
        "engine": engine,
        "prompt_len": prompt_len,
        "gen_len": gen_len,
        "policy": flat(chosen.policy),
        "caveats": list(model.caveats),
        "predicted": _predicted(chosen.prediction)
        | profile.prices.metrics(chosen.prediction.throughput_tok_s / _machines(profile, stages)),
        "error": prediction_error(chosen.prediction.throughput_tok_s, engine, profile, chosen.policy),
        "cell": {
            "engine": engine,
            "workload": {"prompt_len": prompt_len, "gen_len": gen_len},
            "policy": _in_a_suite(to_run),
            "dtype": model.dtype,
            "host_memory": int(profile.host.memory - SYSTEM_BYTES) if profile.device is None else None,
        },
        "pipeline": _pipeline(chosen.prediction, gen_len),
        "workload": _workload(planner, chosen.policy, profile.between if stages > 1 else None),
        "experts": _experts(planner, chosen, source),
        "threads": _threads(planner, chosen.policy) if profile.device else None,
        "accuracy": accuracy_cost(chosen.policy),
        "rejected": rejected,
    }


def _machines(profile: HardwareProfile, stages: int) -> int:
    """How many machines of a profile the stages of a pipeline take: a device each, or a host each."""
    return -(-stages // max(1, profile.devices))


def _stages(stages: int | None, profile: HardwareProfile, policy: OffloadPolicy | None) -> int:
    ranks = 1 if policy is None else policy.pipeline
    if stages is not None and ranks not in (1, stages):
        raise HarnessError(f"--stages {stages} with policy.pipeline {ranks}: leave one of them out")
    return stages or (ranks if ranks > 1 else max(1, profile.devices))


def _in_a_suite(policy: OffloadPolicy) -> dict[str, Any]:
    """A policy by a suite's keys: schedule and batches, and what differs from the defaults."""
    always = ("schedule", "gpu_batch_size", "num_gpu_batches")
    settings = {f.name: (getattr(policy, f.name), f.default) for f in fields(policy)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in settings.items()
        if name in always or value != default
    }


def flat(policy: OffloadPolicy) -> dict[str, Any]:
    """A policy with one key for each fraction: wg wc wd, cg cc cd, hg hc hd."""
    settings = {f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in _KINDS}
    for kind, letter in _KINDS.items():
        fractions = getattr(policy, kind)
        if fractions is not None:
            settings |= {letter + tier: fraction for tier, fraction in zip(_TIERS, fractions, strict=True)}
    return settings


def nested(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of flat: wg wc wd become `weights`, and so on. Keys as in a suite stay.

    Raises HarnessError if only some of three fractions are given, or if they are given in both ways.
    """
    settings = dict(policy)
    for kind, letter in _KINDS.items():
        names = [letter + tier for tier in _TIERS]
        given = [name for name in names if name in settings]
        if given and len(given) < len(names):
            raise HarnessError(f"policy has {', '.join(given)} without {', '.join(n for n in names if n not in given)}")
        if given and kind in settings:
            raise HarnessError(f"policy has both {kind} and {', '.join(names)}: give one of them")
        if given:
            settings[kind] = [settings.pop(name) for name in names]
    return settings


def _planner(job: PlannedJob, model: str, profile: HardwareProfile, engine: str, stages: int) -> ClosedFormPlanner:
    shape, [lengths] = job.shape, job.each
    if min(lengths.prompt, lengths.generated) < 1:
        raise HarnessError("a plan needs at least one token of prompt and one to generate")
    if lengths.prompt + lengths.generated > shape.max_context:
        raise HarnessError(f"{lengths.prompt} + {lengths.generated} tokens are more than {model} takes, "
                           f"{shape.max_context}")  # fmt: skip
    cost_model = engine_cost_model(engine)
    if stages > shape.num_layers:
        raise HarnessError(f"{model} has {shape.num_layers} layers: too few for {stages} stages")
    if 1 < profile.devices < stages:
        raise HarnessError(f"hardware {profile.name} has {profile.devices} devices: too few for {stages} stages")
    return planner_for(job, profile, cost_model, stages)


def _offered(engine: EngineCostModel, schedules: Sequence[Schedule], in_step: bool) -> Sequence[Schedule]:
    """The schedules that the engine has, of those allowed; a pipeline of devices runs batches `in_step`."""
    offered = [name for name in engine.schedules if not (in_step and name == "sweep")]
    allowed = [schedule for schedule in schedules if schedule in offered]
    if not allowed:
        raise HarnessError(f"engine {engine.name} has no schedule {', '.join(schedules)} (it has {', '.join(offered)})")
    return allowed


def _given(planner: ClosedFormPlanner, policy: OffloadPolicy) -> Candidate:
    schedules = planner.engine.schedules
    if policy.schedule not in schedules:
        raise HarnessError(f"the engine has no schedule {policy.schedule} (it has {', '.join(schedules)})")
    planner.engine.offered_bits([(policy.weight_bits, policy.kv_bits)])
    if policy.schedule == "row" and policy.num_gpu_batches > 1:
        raise HarnessError(f"schedule row has one batch at a time, not {policy.num_gpu_batches}: "
                           "set num_gpu_batches to 1, or take zigzag")  # fmt: skip
    if missing := _missing(planner, policy):
        where = f"infeasible on {planner.profile.name}"
        raise InfeasibleError(f"{where}: {shortage(missing)}; {_remedy(planner, policy)}", missing)
    complete = planner.with_fractions(policy)
    return Candidate(complete, planner.predict(complete))


def _missing(planner: ClosedFormPlanner, policy: OffloadPolicy) -> Mapping[str, float]:
    """Bytes that each tier is short of for a policy. Raises HostPlanner's InfeasibleError, which says it in full."""
    try:
        return planner.missing(planner.predict(planner.with_fractions(policy)))
    except InfeasibleError as exc:
        if isinstance(planner, HostPlanner):
            raise
        return exc.lacking


def _remedy(planner: ClosedFormPlanner, policy: OffloadPolicy) -> str:
    """The smallest change to a policy that makes it fit."""
    sizes = range(1, policy.gpu_batch_size)
    size = bisect.bisect_left(sizes, True, key=lambda n: bool(_missing(planner, replace(policy, gpu_batch_size=n))))
    if size:
        return f"gpu_batch_size {size} would fit"
    space = SearchSpace(schedules=[policy.schedule], bits=[(policy.weight_bits, policy.kv_bits)])
    best = search(planner, space).best
    if best is None:
        return f"no placement of {policy.weight_bits}-bit weights and {policy.kv_bits}-bit cache fits"
    return f"another placement would: --policy '{json.dumps(flat(best.policy))}'"


def _nothing_fits(planner: ClosedFormPlanner, space: SearchSpace) -> InfeasibleError:
    """Why not even one sequence fits, or not within the latency limit."""
    where = f"infeasible on {planner.profile.name}: "
    # no block ends sooner than that of a single sequence
    runnable = [policy for kind in space.kinds() if (policy := planner.runnable(kind))]
    if runnable:
        soonest = min(planner.predict(policy).block_latency_s for policy in runnable)
        latency = f"no policy ends a block within {space.latency_s:g} s; {soonest:.3g} s is the least"
        return InfeasibleError(where + latency)
    weight_bits, kv_bits = min(space.bits)
    # a planner of our engine raises here itself, with the numbers
    policy = planner.with_fractions(OffloadPolicy(weight_bits=weight_bits, kv_bits=kv_bits))
    missing = planner.missing(planner.predict(policy))
    return InfeasibleError(f"{where}one sequence, with all of it on disk: {shortage(missing)}", missing)


def shortage(missing: Mapping[str, float]) -> str:
    """Missing bytes in words."""
    return ", ".join(f"{tier} memory lacks {short:,.0f} bytes" if tier != "disk" else f"disk lacks {short:,.0f} bytes"
                     for tier, short in missing.items())  # fmt: skip


def _predicted(prediction: Prediction) -> dict[str, Any]:
    figures = {name: getattr(prediction, name) for name in _FIGURES}
    return figures | {"peak_bytes": asdict(prediction.peak), "busy": dict(prediction.busy)}


def _pipeline(prediction: Prediction, generated: int) -> dict[str, Any] | None:
    """What each stage does in the job's time, in seconds, and which one takes longest; None without stages."""
    use = prediction.pipeline
    if use is None:
        return None
    slowest, limit = use.bottleneck
    decoded = prediction.requests * (generated - 1)
    return {
        "groups": use.groups,
        "bottleneck": {"stage": slowest + 1, "limited_by": limit},
        "decode_throughput_tok_s": decoded / prediction.decode_s if prediction.prefill_s and decoded else None,
        "stages": [
            {"stage": k, "layers": layers, "idle_share": stage.idle_share, "limited_by": stage.limited_by}
            | {name: getattr(stage, name) for name in ("busy_s", "fill_s", "drain_s", "link_s", "stage_s")}
            for k, (layers, stage) in enumerate(zip(use.layers, use.stages, strict=True), 1)
        ],
    }


def _workload(planner: ClosedFormPlanner, policy: OffloadPolicy, between: float | None) -> dict[str, Any]:
    """Which resource bounds a pass at the policy's batch: the time of each over that of arithmetic."""
    times = planned_pass(planner.shape, policy, planner.lengths, planner.machine, between)
    return {"bound_by": times.bound_by, "compute_s": times.compute, "ratios": times.ratios}


def _experts(planner: ClosedFormPlanner, chosen: Candidate, source: str) -> dict[str, Any] | None:
    """What a mixture's plan assumes of its experts: the counts of the checkpoint `source`, or uniform use, and the part
    of their bytes that a pass of the steady batch needs; or that every pass needs all, as the closed form does. None
    without experts."""
    if not planner.shape.params_idle:
        return None
    read = planner.read_share(chosen.policy, chosen.prediction.together)
    if read is None:
        return {"usage": "all", "read": 1.0}
    if not planner.job.counts:
        return {"usage": "uniform", "read": read}
    passes = max(counts.passes for counts in planner.job.counts)
    return {"usage": "measured", "read": read, "of": source, "passes": passes}


def _threads(planner: ClosedFormPlanner, policy: OffloadPolicy) -> dict[str, Any]:
    """How the host's threads are best divided beside a device, and the throughput with that and with the default."""
    allotment = allot(planner.profile, planner.engine, planner.shape, policy, planner.lengths)

    def throughput(control: bool) -> float:
        return planner.with_thread_control(control).predict(replace(policy, threads=None)).throughput_tok_s

    return allotment.plain() | {
        "throughput_tok_s": throughput(True),
        "default_throughput_tok_s": throughput(False),
    }


def _rejected(name: str, candidate: Candidate | None, reason: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": name, "reason": reason}
    if candidate is not None:
        entry |= {"throughput_tok_s": candidate.prediction.throughput_tok_s, "policy": flat(candidate.policy)}
    return entry
