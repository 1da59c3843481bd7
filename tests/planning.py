"""Plans of one job on the shipped machines, for tests of planners."""

from dataclasses import replace

from engines.models.shapes import shape
from engines.planning.closed_form_planner import ClosedFormPlanner
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.plan import plan
from engines.planning.planned_job import PlannedJob
from engines.planning.search import Candidate, SearchSpace, search
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import HardwareProfile, ModelDescription, OffloadPolicy

OPT_30B, OPT_175B = "facebook/opt-30b", "facebook/opt-175b"

JOB = PlannedJob(shape(OPT_30B), [Lengths(512, 32)])

PROFILES = {name: hardware.load(name) for name in hardware.names()}

OFFLOAD = engine_cost_model("offload")


def planner(profile: HardwareProfile = PROFILES["t4_gcp"], model: str = OPT_30B) -> ClosedFormPlanner:
    """Plans the offload engine for 512 + 32 tokens."""
    return ClosedFormPlanner(replace(JOB, shape=shape(model)), profile, OFFLOAD)


def best(planner: ClosedFormPlanner, space: SearchSpace) -> Candidate:
    """What a search finds, which must be something."""
    found = search(planner, space).best
    assert found is not None
    return found


def made(model: str = OPT_30B, prompt: int = 512, generated: int = 32, machine: str = "t4_gcp", engine: str = "offload",
         policy: OffloadPolicy | None = None, latency: float | None = None,
         stages: int | None = None) -> dict[str, object]:  # fmt: skip
    described = ModelDescription(model, shape(model))
    return plan(described, prompt, generated, PROFILES[machine], engine, schedules=("row", "zigzag", "sweep"),
                bits=[(16, 16)], latency_s=latency, policy=policy, stages=stages)  # fmt: skip
