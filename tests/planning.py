"""Plans of one job on the shipped machines, and policies to draw, for tests of planners."""

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.planning.closed_form_planner import ClosedFormPlanner
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.plan import plan
from engines.planning.planned_job import PlannedJob
from engines.planning.search import Candidate, SearchSpace, search
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import HardwareProfile, ModelDescription, OffloadPolicy, Schedule

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


machines = st.sampled_from(["t4_gcp", "a100_40g"])

fractions = st.sampled_from([(1.0, 0.0, 0.0), (0.2, 0.8, 0.0), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0)])


@st.composite
def policies(draw: st.DrawFn) -> OffloadPolicy:
    schedule: Schedule = draw(st.sampled_from(["row", "zigzag", "sweep"]))
    bits = st.sampled_from([16, 8, 4])
    return OffloadPolicy(
        gpu_batch_size=draw(st.sampled_from([1, 8, 48])),
        num_gpu_batches=draw(st.sampled_from([2, 8])) if schedule == "zigzag" else 1,
        schedule=schedule,
        weights=draw(fractions),
        cache=draw(fractions),
        activations=draw(fractions),
        weight_bits=draw(bits),
        kv_bits=draw(bits),
        cpu_attention=draw(st.booleans()),
        overlap=draw(st.booleans()),
    )


def faster(profile: HardwareProfile) -> Iterator[HardwareProfile]:
    """The machine with one thing twice as fast."""
    assert profile.device is not None
    assert profile.link is not None
    for part, rate in (("disk", "read"), ("disk", "write"), ("link", "h2d"), ("link", "d2h"), ("device", "bandwidth")):
        slower = getattr(profile, part)
        yield replace(profile, **{part: replace(slower, **{rate: 2 * getattr(slower, rate)})})
    flops = {rows: 2 * rate for rows, rate in profile.device.flops.items()}
    yield replace(profile, device=replace(profile.device, flops=flops))
