"""Predictions for a pipeline: stages of consecutive layers, one device each, through which batches pass in turn.

Source: FlexGen (Sheng et al. 2023), section 4.4 and table 3.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.device_planner import DevicePlanner
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.workload import VALUE_BYTES, Lengths
from harness.api import Dtype, HardwareProfile, ModelShape, OffloadPolicy


class PipelinePlanner(ClosedFormPlanner):
    """Plans the longest stage, which sets the pace. A policy is one stage's placement, and all stages' batches.

    The devices of one profile share its host. If the profile has a single device, each stage has its own machine.
    """

    def __init__(
        self, shape: ModelShape, lengths: Lengths, profile: HardwareProfile, engine: EngineCostModel, stages: int
    ) -> None:
        layers = math.ceil(shape.num_layers / stages)
        idle = shape.params_idle * layers // shape.num_layers
        stage_shape = replace(shape, num_layers=layers, params_idle=idle)
        super().__init__(stage_shape, lengths, _stage_profile(profile, stages), engine)
        self.stages = stages
        self._between = profile.between

    def predict(self, policy: OffloadPolicy, page_cache: bool = True) -> Prediction:
        """For one block, with the time until the last stage gets its first batch.

        A batch starts its next pass when it has left the last stage, so with fewer batches than stages some stages
        idle.
        """
        stage = super().predict(policy, page_cache)
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

    estimate = predict

    def _hop_s(self, policy: OffloadPolicy) -> float:
        """Seconds to send one token of each of a batch's sequences to the next stage."""
        nbytes = policy.gpu_batch_size * self.shape.hidden * VALUE_BYTES
        return nbytes / self._between if self._between else 0.0


def planner_for(
    shape: ModelShape, lengths: Lengths, profile: HardwareProfile, engine: EngineCostModel, stages: int, *,
    each: Sequence[Lengths] = (), dtype: Dtype = "float16", budget: float | None = None, reserved: int | None = None,
) -> ClosedFormPlanner:  # fmt: skip
    """The planner for one device, or a pipeline of several. Keywords apply to our engine on one: see DevicePlanner."""
    if stages > 1:
        return PipelinePlanner(shape, lengths, profile, engine, stages)
    if engine.name == "offload":
        return DevicePlanner(shape, lengths, profile, engine, each=each, dtype=dtype, budget=budget, reserved=reserved)
    return ClosedFormPlanner(shape, lengths, profile, engine)


def _stage_profile(profile: HardwareProfile, stages: int) -> HardwareProfile:
    """One stage's share of the host."""
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
    return replace(
        profile,
        host=shared,
        disk=replace(disk, capacity=disk.capacity / parts, read=disk.read / parts, write=disk.write / parts),
    )
