"""`harness plan`: from a user's options to a policy and its prediction."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness import hardware, registry
from harness.api import Bits, HarnessError, OffloadPolicy, Schedule
from harness.suite import check as suite_check
from harness.suite import yaml_source

_QUANTIZE = re.compile(r"(3|4|8|16)(?::(3|4|8|16))?")
_SCHEDULES = ("row", "zigzag", "sweep")


@dataclass(frozen=True)
class PlanOptions:
    """The options of `harness plan`: a model, the lengths of its requests in tokens, a machine, and constraints.

    `hardware` names a profile; `schedules` are those to choose from, all if empty; `quantize` says which bits may be
    chosen; `latency` is the most seconds that a block may take, and `stages` the devices of a pipeline. A `policy`, in
    JSON, is predicted as it is.
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
    return registry.planner().plan(
        options.model, options.prompt_len, options.gen_len, hardware.load(options.hardware, options.cache),
        options.engine, schedules=schedules, bits=_bits(options.quantize),
        latency_s=options.latency, policy=None if options.policy is None else _policy(options.policy),
        stages=options.stages, report=report,
    )  # fmt: skip


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
