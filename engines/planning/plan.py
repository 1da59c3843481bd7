"""`harness plan`: a policy that can be run as it stands, or the numbers that say why there is none, as plain data."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from engines.models.shapes import shape
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import ENGINE_COST_MODELS
from engines.planning.host_planner import HostPlanner
from engines.planning.pipeline import planner_for
from engines.planning.search import ALL_BITS, Candidate, Report, SearchSpace, kinds, search, unheard
from engines.planning.threads import allotted
from engines.planning.workload import Lengths
from harness.api import Bits, HardwareProfile, HarnessError, InfeasibleError, OffloadPolicy, Schedule

#: Rejected alternatives that are listed.
_LISTED = 8
_KINDS = {"weights": "w", "cache": "c", "activations": "h"}
_PLACES = "gcd"


def plan(
    model: str, prompt_len: int, gen_len: int, profile: HardwareProfile, engine: str, *,
    schedules: Sequence[Schedule], bits: Sequence[tuple[Bits, Bits]] | None, latency_s: float | None,
    policy: OffloadPolicy | None, stages: int | None, report: Report = unheard,
) -> dict[str, Any]:  # fmt: skip
    """The plan: the best policy, or what a given one will do. `report` is told how far the search is.

    `stages`: a device each, None for as many as the profile has devices. `bits`: of weights and cache, that may be
    chosen; None: whatever is best. Raises HarnessError for what cannot be planned, and InfeasibleError with the bytes
    that each tier lacks.
    """
    stages = stages or max(1, profile.devices)
    planner = _planner(model, prompt_len, gen_len, profile, engine, stages)
    if policy is not None:
        if stages > 1 and policy.schedule == "sweep":
            raise HarnessError("a pipeline has batches in step: take schedule row or zigzag, not sweep")
        chosen, rejected = _given(planner, policy), []
    else:
        threads = None if profile.device else allotted(profile)
        attention = (False,) if profile.device is None else (False, True)
        offered = _offered(engine, schedules, stages)
        wanted = SearchSpace(
            schedules=offered,
            bits=ALL_BITS if bits is None else bits,
            cpu_attention=attention,
            latency_s=latency_s,
            base=OffloadPolicy(threads=threads),
        )
        found = search(planner, wanted, report)
        if found.best is None:
            raise _nothing_fits(planner, wanted)
        chosen = replace(found.best, policy=planner.placed(found.best.policy))
        rejected = [_rejected(*item) for item in found.rejected[:_LISTED]]
    return {
        "model": model,
        "hardware": profile.name,
        "devices": profile.devices,
        "stages": stages,
        "engine": engine,
        "prompt_len": prompt_len,
        "gen_len": gen_len,
        "policy": flat(chosen.policy),
        "predicted": _predicted(chosen.prediction),
        "rejected": rejected,
    }


def flat(policy: OffloadPolicy) -> dict[str, Any]:
    """A policy with its fractions by name: wg wc wd, cg cc cd, hg hc hd."""
    found = {f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in _KINDS}
    for kind, letter in _KINDS.items():
        fractions = getattr(policy, kind)
        if fractions is not None:
            found |= {letter + place: fraction for place, fraction in zip(_PLACES, fractions, strict=True)}
    return found


def nested(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round: wg wc wd become `weights`, and so on; what is named as in a suite stays.

    Raises HarnessError where only some of three fractions are given, or where they are given twice.
    """
    left = dict(policy)
    for kind, letter in _KINDS.items():
        names = [letter + place for place in _PLACES]
        given = [name for name in names if name in left]
        if given and len(given) < len(names):
            raise HarnessError(f"policy has {', '.join(given)} without {', '.join(n for n in names if n not in given)}")
        if given and kind in left:
            raise HarnessError(f"policy has both {kind} and {', '.join(names)}: give one of them")
        if given:
            left[kind] = [left.pop(name) for name in names]
    return left


def _planner(
    model: str, prompt_len: int, gen_len: int, profile: HardwareProfile, engine: str, stages: int
) -> ClosedFormPlanner | HostPlanner:
    found = shape(model)
    if min(prompt_len, gen_len) < 1:
        raise HarnessError("a plan needs at least one token of prompt and one to generate")
    if prompt_len + gen_len > found.max_context:
        raise HarnessError(f"{prompt_len} + {gen_len} tokens are more than {model} takes, {found.max_context}")
    if engine not in ENGINE_COST_MODELS:
        raise HarnessError(f"no plans are made for engine {engine!r} (known: {', '.join(ENGINE_COST_MODELS)})")
    lengths = Lengths(prompt_len, gen_len)
    if stages > found.num_layers:
        raise HarnessError(f"{model} has {found.num_layers} layers: too few for {stages} stages")
    if 1 < profile.devices < stages:
        raise HarnessError(f"hardware {profile.name} has {profile.devices} devices: too few for {stages} stages")
    if profile.device is None:
        if stages > 1:
            raise HarnessError(f"hardware {profile.name} has no device: stages are planned for devices only")
        if engine != "offload":
            raise HarnessError(f"hardware {profile.name} has no device: only offload is planned there, not {engine}")
        return HostPlanner(found, lengths, profile)
    return planner_for(found, lengths, profile, engine, stages)


def _offered(engine: str, schedules: Sequence[Schedule], stages: int) -> Sequence[Schedule]:
    """Of the schedules those that an engine has; a pipeline has batches in step."""
    offered = [name for name in ENGINE_COST_MODELS[engine].schedules if stages == 1 or name != "sweep"]
    found = [schedule for schedule in schedules if schedule in offered]
    if not found:
        raise HarnessError(f"engine {engine} has no schedule {', '.join(schedules)} (it has {', '.join(offered)})")
    return found


def _given(planner: ClosedFormPlanner | HostPlanner, policy: OffloadPolicy) -> Candidate:
    if policy.schedule not in planner.style.schedules:
        raise HarnessError(
            f"the engine has no schedule {policy.schedule} (it has {', '.join(planner.style.schedules)})"
        )
    if policy.schedule == "row" and policy.num_gpu_batches > 1:
        raise HarnessError(f"schedule row has one batch at a time, not {policy.num_gpu_batches}: "
                           "set num_gpu_batches to 1, or take zigzag")  # fmt: skip
    if lacking := _lacking(planner, policy):
        where = f"infeasible on {planner.profile.name}"
        raise InfeasibleError(f"{where}: {shortage(lacking)}; {_remedy(planner, policy)}", lacking)
    placed = planner.placed(policy)
    return Candidate(placed, planner.predict(placed))


def _lacking(planner: ClosedFormPlanner | HostPlanner, policy: OffloadPolicy) -> Mapping[str, float]:
    """Bytes that each tier is short of for a policy. Raises InfeasibleError as HostPlanner does, whose words are those
    of the engine."""
    try:
        return planner.lacking(planner.predict(planner.placed(policy)))
    except InfeasibleError as exc:
        if isinstance(planner, HostPlanner):
            raise
        return exc.lacking


def _remedy(planner: ClosedFormPlanner | HostPlanner, policy: OffloadPolicy) -> str:
    """The smallest change to a policy that makes it fit."""
    size = bisect.bisect_left(
        range(1, policy.gpu_batch_size), True, key=lambda n: not _fits(planner, replace(policy, gpu_batch_size=n))
    )
    if size:
        return f"gpu_batch_size {size} would fit"
    best = search(planner, SearchSpace(schedules=[policy.schedule], bits=[(policy.weight_bits, policy.kv_bits)])).best
    if best is None:
        return f"no placement of {policy.weight_bits}-bit weights and {policy.kv_bits}-bit cache fits"
    return f"another placement would: --policy '{json.dumps(flat(best.policy))}'"


def _fits(planner: ClosedFormPlanner | HostPlanner, policy: OffloadPolicy) -> bool:
    return not _lacking(planner, policy)


def _nothing_fits(planner: ClosedFormPlanner | HostPlanner, wanted: SearchSpace) -> InfeasibleError:
    """Why not even one sequence fits, or not under the constraints."""
    where = f"infeasible on {planner.profile.name}: "
    # nothing ends sooner than a single sequence
    ones = [runnable for kind in kinds(wanted) if (runnable := planner.runnable(kind))]
    if ones:
        soonest = min(planner.predict(one).block_latency_s for one in ones)
        latency = f"no policy ends a block within {wanted.latency_s:g} s; {soonest:.3g} s is the least"
        return InfeasibleError(where + latency)
    weight_bits, kv_bits = min(wanted.bits)
    # raises by itself, with the numbers, where the engine places
    one = planner.placed(OffloadPolicy(weight_bits=weight_bits, kv_bits=kv_bits))
    lacking = planner.lacking(planner.predict(one))
    return InfeasibleError(f"{where}one sequence, with all of it on disk: {shortage(lacking)}", lacking)


def shortage(lacking: Mapping[str, float]) -> str:
    """What is lacking, in words."""
    return ", ".join(f"{tier} memory lacks {short:,.0f} bytes" if tier != "disk" else f"disk lacks {short:,.0f} bytes"
                     for tier, short in lacking.items())  # fmt: skip


def _predicted(prediction: Prediction) -> dict[str, Any]:
    return {
        "throughput_tok_s": prediction.throughput_tok_s,
        "prefill_s": prediction.prefill_s,
        "decode_s": prediction.decode_s,
        "block_latency_s": prediction.block_latency_s,
        "bottleneck": prediction.bottleneck,
        "fraction_of_roofline": prediction.fraction_of_roofline,
        "peak_bytes": asdict(prediction.peak),
        "busy": dict(prediction.busy),
    }


def _rejected(name: str, candidate: Candidate | None, reason: str) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": name, "reason": reason}
    if candidate is not None:
        found |= {"throughput_tok_s": candidate.prediction.throughput_tok_s, "policy": flat(candidate.policy)}
    return found
