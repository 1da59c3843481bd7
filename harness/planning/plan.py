"""`harness plan`: from a user's options to a policy and its prediction."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from harness import hardware, registry
from harness.api import Bits, HardwareProfile, HarnessError, ModelSpec, OffloadPolicy, Schedule
from harness.common.units import parse_size
from harness.planning.suite import suite_of
from harness.suite import check as suite_check
from harness.suite import yaml_source

_QUANTIZE = re.compile(r"(3|4|8|16)(?::(3|4|8|16))?")
_SCHEDULES = ("row", "zigzag", "sweep")


@dataclass(frozen=True)
class PlanOptions:
    """The options of `harness plan`: a model, the lengths of its requests in tokens, a machine, and constraints.

    `hardware` names a profile; `schedules` are those to choose from, all if empty; `quantize` says which bits may be
    chosen; `latency` is the most seconds that a block may take, and `stages` the machines or devices of a pipeline. A
    `policy`, in JSON, is predicted as it is. `memory`, `device_memory` and `disk` are sizes such as 4GiB that the job
    may take, of each stage; None for all that there is.
    """

    model: str
    prompt_len: int
    gen_len: int
    hardware: str
    engine: str
    schedules: tuple[str, ...]
    quantize: str
    latency: float | None
    stages: int | None
    policy: str | None
    memory: str | None
    device_memory: str | None
    disk: str | None
    cache: Path


def make_plan(options: PlanOptions, report: Callable[[int, int], None]) -> dict[str, Any]:
    """The plan as plain data; see engines.planning.plan. `report` is told the search's progress: steps done, and all.

    Raises HarnessError for options that are malformed or contradict each other, and InfeasibleError where nothing fits.
    """
    if options.latency is not None and math.isnan(options.latency):
        raise HarnessError("--latency is not a number of seconds")
    if options.policy is not None and (options.latency is not None or options.quantize != "none"):
        raise HarnessError("--policy predicts that policy as it is: leave out --latency and --quantize")
    schedules = cast(Sequence[Schedule], options.schedules or _SCHEDULES)
    bits, policy = _bits(options.quantize), None if options.policy is None else _policy(options.policy)
    profile = _granted(hardware.load(options.hardware, options.cache), options)
    model = registry.describe_model(options.engine, ModelSpec(options.model), options.cache)
    plan = registry.planner().plan(
        model, options.prompt_len, options.gen_len, profile, options.engine, schedules=schedules, bits=bits,
        latency_s=options.latency, policy=policy, stages=options.stages,
        budget=None if options.memory is None else int(profile.host.memory), report=report, kept=options.cache,
    )  # fmt: skip
    cell, runs = plan.pop("cell"), plan["stages"] == 1 or profile.device is None
    return plan | {"suite": suite_of(cell, options.model, options.memory, profile) if runs else None}


def _granted(profile: HardwareProfile, options: PlanOptions) -> HardwareProfile:
    """The machine with no more memory and disk than the options grant. Raises HarnessError for more than it has."""
    host, device, disk = profile.host, profile.device, profile.disk
    if options.memory is not None:
        host = replace(host, memory=_part("--memory", options.memory, host.memory, f"{profile.name}'s host has"))
    if options.device_memory is not None:
        if device is None:
            raise HarnessError(f"--device-memory: hardware {profile.name} has no device")
        has = f"each device of {profile.name} has"
        device = replace(device, memory=_part("--device-memory", options.device_memory, device.memory, has))
    if options.disk is not None:
        disk = replace(disk, capacity=_part("--disk", options.disk, disk.capacity, f"{profile.name}'s disk has"))
    return replace(profile, host=host, device=device, disk=disk)


def _part(option: str, text: str, all_of_it: float, has: str) -> float:
    """Bytes of a size, at most what there is."""
    try:
        size = parse_size(text)
    except HarnessError as exc:
        raise HarnessError(f"{option}: {exc}") from None
    if not 0 < size <= all_of_it:
        larger = "to plan for a larger machine, give its profile by --hardware FILE"
        raise HarnessError(f"{option} {text}: {has} {all_of_it / 2**30:.4g} GiB; {larger}")
    return float(size)


def _bits(quantize: str) -> list[tuple[Bits, Bits]] | None:
    """The pairs of bits, of weights and KV cache, that a search may choose from; None for all."""
    if quantize == "none":
        return [(16, 16)]
    if quantize == "auto":
        return None
    match = _QUANTIZE.fullmatch(quantize)
    if not match:
        raise HarnessError(f"--quantize {quantize}: expected none, auto, bits (3, 4, 8 or 16), or two such as 4:16")
    return [(cast(Bits, int(match[1])), cast(Bits, int(match[2] or match[1])))]


def _policy(text: str) -> OffloadPolicy:
    """Parses a policy in JSON, in the form of `plan --json` or of a suite."""
    given = yaml_source.parse(text, "--policy", positions=False).plain()
    if not isinstance(given, dict):
        raise HarnessError(f"--policy: expected a JSON object, got {text[:64]!r}")
    nested = json.dumps(registry.planner().nested(given), ensure_ascii=False)
    return suite_check.policy(yaml_source.parse(nested, "--policy", positions=False))
