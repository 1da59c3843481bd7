"""Plans for our engine on a pipeline of devices: every stage by its own memory plan and passes, as on one device."""

from dataclasses import replace

from engines.offload.memory.stage_times import stage_shape
from engines.planning.closed_form_planner import Phases
from engines.planning.device_pipeline import DevicePipelinePlanner
from engines.planning.device_planner import DevicePlanner
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.memory import TierBytes
from engines.planning.planned_job import PlannedJob
from harness.api import HardwareProfile, ModelShape, OffloadPolicy


class OffloadDevicePipelinePlanner(DevicePipelinePlanner):
    """As DevicePipelinePlanner, with each stage's memory for the batches of all groups, as ranks plan it."""

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel, stages: int) -> None:
        super().__init__(job, profile, engine, stages)
        longest = stage_shape(job.shape, max(self.layers), is_last=True)
        self._planners = {
            shape: DevicePlanner(replace(job, shape=shape, counts=()), self.profile, engine)
            for shape in dict.fromkeys([longest, *self.shapes])
        }
        self._longest = self._planners[longest]

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with the fractions of the longest stage's memory plan, or with all weights on the devices, so that
        several groups are under way, if that is estimated to be faster; None if neither fits."""
        kinds = [policy] if policy.weights else [policy, replace(policy, weights=(1.0, 0.0, 0.0))]
        fitting = [found for kind in kinds if (found := self._longest.runnable(kind))]
        return max(fitting, key=lambda found: self.estimate(found).throughput_tok_s, default=None)

    def with_fractions(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the fractions that the engine would realise. Raises InfeasibleError as it does."""
        return self._longest.with_fractions(policy)

    def peak(self, policy: OffloadPolicy) -> TierBytes:
        return self._longest.peak(policy)

    def stage_phases(self, shape: ModelShape, own: OffloadPolicy, policy: OffloadPolicy) -> Phases:
        return self._planners[shape].phases(own, policy)
