"""Predictions for a model cut into stages of layers, a device each, through which batches pass one after the other.

Source: FlexGen (Sheng et al. 2023), section 4.4 and table 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.device_planner import DevicePlanner
from engines.planning.workload import Lengths
from harness.api import Dtype, HardwareProfile, ModelShape, OffloadPolicy


class PipelinePlanner(ClosedFormPlanner):
    """Plans the longest stage; the others keep its pace. A policy is one stage's: its placement, and all batches.

    A profile with as many devices has one host for all of them, and each stage its part; one with a single device is
    each stage's own machine.
    """

    def __init__(self, shape: ModelShape, lengths: Lengths, profile: HardwareProfile, engine: str, stages: int) -> None:
        layers = math.ceil(shape.num_layers / stages)
        idle = shape.params_idle * layers // shape.num_layers
        super().__init__(replace(shape, num_layers=layers, params_idle=idle), lengths, _part(profile, stages), engine)
        self.stages = stages
        self._between = profile.between

    def predict(self, policy: OffloadPolicy, page_cache: bool = True) -> Prediction:
        """Of a block, with what it takes until the last stage has something to do.

        A token's pass begins when the last one's batch has come through all stages: with fewer batches than stages
        some wait.
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
        """Seconds that a batch's activations, a token of each sequence, take from one stage to the next."""
        nbytes = policy.gpu_batch_size * self.shape.hidden * 2
        return nbytes / self._between if self._between else 0.0


def planner_for(
    shape: ModelShape, lengths: Lengths, profile: HardwareProfile, engine: str, stages: int, *,
    each: Sequence[Lengths] = (), dtype: Dtype = "float16", budget: float | None = None, reserved: int | None = None,
) -> ClosedFormPlanner:  # fmt: skip
    """Of one device, or of a pipeline of them. The job's particulars are for our engine on one: see DevicePlanner."""
    if stages > 1:
        return PipelinePlanner(shape, lengths, profile, engine, stages)
    if engine == "offload":
        return DevicePlanner(shape, lengths, profile, each=each, dtype=dtype, budget=budget, reserved=reserved)
    return ClosedFormPlanner(shape, lengths, profile, engine)


def _part(profile: HardwareProfile, stages: int) -> HardwareProfile:
    """What a stage has of a host that all of them share."""
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
