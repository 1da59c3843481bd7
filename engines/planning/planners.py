"""Which planner a machine and an engine have."""

from engines.planning.closed_form_planner import ClosedFormPlanner
from engines.planning.device_pipeline import DevicePipelinePlanner
from engines.planning.device_planner import DevicePlanner
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.generate_planner import GeneratePlanner
from engines.planning.host_pipeline import HostPipelinePlanner
from engines.planning.host_planner import HostPlanner
from engines.planning.offload_device_pipeline import OffloadDevicePipelinePlanner
from engines.planning.planned_job import PlannedJob
from engines.planning.simulated_planner import SimulatedPlanner
from harness.api import HardwareProfile, HarnessError, RankLink


def planner_for(
    job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel, stages: int, at_once: float | None = None,
    link: RankLink | None = None,
) -> ClosedFormPlanner:  # fmt: skip
    """The planner for a host alone, one device, or a pipeline of several of either. `at_once`, `link`: of the ranks of
    one host, as in HostPipelinePlanner.

    Raises HarnessError for another engine than ours where there is no device.
    """
    if profile.device is None:
        if engine.name != "offload":
            raise HarnessError(
                f"hardware {profile.name} has no device: only offload is planned there, not {engine.name}"
            )
        return HostPlanner(job, profile) if stages == 1 else HostPipelinePlanner(job, profile, stages, at_once, link)
    if stages > 1:
        pipeline = OffloadDevicePipelinePlanner if engine.name == "offload" else DevicePipelinePlanner
        return pipeline(job, profile, engine, stages)
    if engine.weight_tiers:
        return GeneratePlanner(job, profile, engine)
    return (DevicePlanner if engine.name == "offload" else SimulatedPlanner)(job, profile, engine)
