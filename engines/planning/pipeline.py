"""Which planner a machine and an engine have, and predictions for a pipeline.

A pipeline has stages of consecutive layers, one device each, through which batches pass in turn.

Source: FlexGen (Sheng et al. 2023), section 4.4 and table 3.
"""

import math
from dataclasses import replace

from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.device_planner import DevicePlanner
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.generate_planner import GeneratePlanner
from engines.planning.host_planner import HostPlanner
from engines.planning.planned_job import PlannedJob
from engines.planning.simulated_planner import SimulatedPlanner
from engines.planning.workload import VALUE_BYTES
from harness.api import HardwareProfile, HarnessError, OffloadPolicy


class PipelinePlanner(SimulatedPlanner):
    """Plans the longest stage, which sets the pace. A policy is one stage's placement, and all stages' batches.

    The devices of one profile share its host. If the profile has a single device, each stage has its own machine.
    """

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel, stages: int) -> None:
        layers = math.ceil(job.shape.num_layers / stages)
        idle = job.shape.params_idle * layers // job.shape.num_layers
        stage_shape = replace(job.shape, num_layers=layers, params_idle=idle)
        super().__init__(replace(job, shape=stage_shape), _stage_profile(profile, stages), engine)
        self.stages = stages
        self._between = profile.between

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """For one block, with the time until the last stage gets its first batch.

        A batch starts its next pass when it has left the last stage, so with fewer batches than stages some stages
        idle.
        """
        return self._of_stages(super().predict(policy), policy)

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        return self._of_stages(super().estimate(policy), policy)

    def _of_stages(self, stage: Prediction, policy: OffloadPolicy) -> Prediction:
        """All stages, from the prediction for the longest."""
        batches = policy.num_gpu_batches
        hop = (self.stages - 1) * self._hop_s(policy)
        prefill = stage.prefill_s * (1 + (self.stages - 1) / batches) + hop * self.lengths.prompt
        decode = stage.decode_s * max(1.0, self.stages / batches)
        if batches < self.stages:
            decode += hop * (self.lengths.generated - 1)
        tokens = policy.block_size * self.lengths.generated
        return replace(
            stage,
            throughput_tok_s=tokens / (prefill + decode),
            prefill_s=prefill,
            decode_s=decode,
            block_latency_s=prefill + decode,
        )

    def _hop_s(self, policy: OffloadPolicy) -> float:
        """Seconds to send one token of each of a batch's sequences to the next stage."""
        nbytes = policy.gpu_batch_size * self.shape.hidden * VALUE_BYTES
        return nbytes / self._between if self._between else 0.0


def planner_for(job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel, stages: int) -> ClosedFormPlanner:
    """The planner for a host alone, one device, or a pipeline of several.

    Raises HarnessError for stages or another engine than ours where there is no device.
    """
    if profile.device is None:
        if stages > 1:
            raise HarnessError(f"hardware {profile.name} has no device: stages are planned for devices only")
        if engine.name != "offload":
            raise HarnessError(
                f"hardware {profile.name} has no device: only offload is planned there, not {engine.name}"
            )
        return HostPlanner(job, profile)
    if stages > 1:
        return PipelinePlanner(job, profile, engine, stages)
    if engine.weight_tiers:
        return GeneratePlanner(job, profile, engine)
    return (DevicePlanner if engine.name == "offload" else SimulatedPlanner)(job, profile, engine)


def _stage_profile(profile: HardwareProfile, stages: int) -> HardwareProfile:
    """One stage's share of the host, whose memory also limits its link."""
    parts = min(stages, max(1, profile.devices))
    host, disk = profile.host, profile.disk
    shared = replace(
        host,
        memory=host.memory / parts,
        bandwidth=host.bandwidth / parts,
        flops={rows: rate / parts for rows, rate in host.flops.items()},
        attention={bits: rate / parts for bits, rate in host.attention.items()},
        cores=max(1, host.cores // parts),
    )
    assert profile.link is not None
    link = replace(
        profile.link,
        h2d=min(profile.link.h2d, shared.bandwidth),
        d2h=min(profile.link.d2h, shared.bandwidth),
    )
    return replace(
        profile,
        host=shared,
        link=link,
        disk=replace(disk, capacity=disk.capacity / parts, read=disk.read / parts, write=disk.write / parts),
    )
