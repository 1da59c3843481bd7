"""Plans for a pipeline of devices: each has some of the layers, and groups of sequences pass them in virtual time.

Source: FlexGen (Sheng et al. 2023), section 4.4 and table 3.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from engines.offload.memory.stage_times import stage_shape
from engines.offload.pipeline.cut import even_ends
from engines.planning.closed_form import RESOURCES, SublayerCosts
from engines.planning.closed_form_planner import ClosedFormPlanner, Phases, Prediction, require_modelled
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.engine_pass import simulated_pass
from engines.planning.memory import MemoryConstraint
from engines.planning.placement import Programme, linear_programme
from engines.planning.planned_job import PlannedJob
from engines.planning.virtual_pipeline import Group, PipelineUse, Stage, VirtualLink, run_pipeline, stage_use
from engines.planning.workload import VALUE_BYTES
from harness.api import HardwareProfile, ModelShape, OffloadPolicy


class DevicePipelinePlanner(ClosedFormPlanner):
    """Plans stages on devices that are alike. A policy is a stage's placement, and the batches of all groups.

    The sequences of each batch are divided into as many groups as there are stages, as far as they suffice, and a pass
    of each group is under way at a time. Memory is that of the longest stage, with the head, and of all groups' cache.
    The devices of one profile share its host. If the profile has a single device, each stage has its own machine.

    Raises HarnessError for more stages than layers.
    """

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel, stages: int) -> None:
        ends = even_ends(job.shape, stages)
        self.layers = [end - start for start, end in pairwise([0, *ends])]
        longest = stage_shape(job.shape, max(self.layers), is_last=True)
        super().__init__(replace(job, shape=longest), _stage_profile(profile, stages), engine)
        self.stages = stages
        self.shapes = [stage_shape(job.shape, n, k == stages - 1) for k, n in enumerate(self.layers)]
        self._between = profile.between

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """In closed form, with all stages as long as the longest one."""
        require_modelled(policy)
        engine, peak = self._working(policy)
        groups, own = self._groups(policy), self._of_group(policy)
        phases = self._phases(self.shape, own, engine, peak, SublayerCosts.pass_seconds)
        steps = max(1, self.lengths.generated - 1)
        sent = self._sent(own, self.lengths.prompt), self._sent(own, 1)
        hops = [nbytes / self._between if self._between else 0.0 for nbytes in sent]
        # the first group crosses all stages and links; each further one follows at the pace of the slowest of them
        rounds = [
            (self.stages * seconds + (self.stages - 1) * hop, max(seconds, hop))
            for seconds, hop in zip((phases.prefill_s, phases.decode_s / steps), hops, strict=True)
        ]
        prefill = rounds[0][0] + (groups - 1) * rounds[0][1]
        decode = (self.lengths.generated - 1) * max(rounds[1][0], groups * rounds[1][1])
        return self._prediction(policy, Phases(prefill, decode, groups * phases.used), peak)

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """In virtual time, where decode passes of all lengths take their mean."""
        require_modelled(policy)
        groups, own = self._groups(policy), self._of_group(policy)
        by_shape = {shape: self.stage_phases(shape, own, policy) for shape in dict.fromkeys(self.shapes)}
        phases = [by_shape[shape] for shape in self.shapes]
        steps = self.lengths.generated
        links = [VirtualLink(self._between) for _ in phases]
        blocks = [_Block(steps) for _ in range(groups)]
        visits = run_pipeline(
            [_DeviceStage(each, steps) for each in phases], links, blocks,
            lambda number: self._sent(own, 1 if number else self.lengths.prompt),
        )  # fmt: skip
        end, prefilled = visits[-1].end_s, max(block.prefilled_s for block in blocks)
        uses = [
            stage_use(visits, k, end, dict(zip(RESOURCES, (groups * each.used).tolist(), strict=True)))
            for k, each in enumerate(phases)
        ]
        pipeline = PipelineUse(groups, self.layers, uses, max(link.busy_s for link in links))
        slowest, limit = pipeline.bottleneck
        total = Phases(prefilled, end - prefilled, groups * phases[slowest].used)
        found = self._prediction(policy, total, self.peak(policy))
        return replace(found, bottleneck=limit, pipeline=pipeline)

    def stage_phases(self, shape: ModelShape, own: OffloadPolicy, policy: OffloadPolicy) -> Phases:
        """How long a stage of `shape` takes for one group's part of a policy, in virtual time."""
        engine, peak = self._working(policy)
        return self._phases(shape, own, engine, peak, simulated_pass)

    def _groups(self, policy: OffloadPolicy) -> int:
        """How many are under way. One where an engine's weights stream that would read them again for each."""
        streams = policy.weights is not None and policy.weights[0] < 1
        return 1 if streams and self.engine.one_group_streams else min(self.stages, policy.gpu_batch_size)

    def _of_group(self, policy: OffloadPolicy) -> OffloadPolicy:
        """A group's part of a policy."""
        return replace(policy, gpu_batch_size=-(-policy.gpu_batch_size // self._groups(policy)))

    def _sent(self, policy: OffloadPolicy, tokens: int) -> float:
        """Bytes of hidden states that a group's pass sends on, with so many tokens of each sequence."""
        return policy.block_size * tokens * self.shape.hidden * VALUE_BYTES

    def _constraints(self, policy: OffloadPolicy) -> Sequence[MemoryConstraint]:
        """As many batches as groups need, and one of them at work."""
        parts = min(self.stages, policy.gpu_batch_size)
        batch = -(-policy.gpu_batch_size // parts)
        return super()._constraints(
            replace(policy, gpu_batch_size=batch, num_gpu_batches=parts * policy.num_gpu_batches)
        )

    def _programme(self, policy: OffloadPolicy) -> Programme:
        own, engine = self._of_group(policy), self._engine_for(policy)
        constraints, machine = self._constraints(policy), self._machine_for(policy)
        return linear_programme(self.shape, own, self.lengths, machine, engine, constraints)


class _Block(Group[int]):
    """Sequences in step: pass 0 has their prompts, each further one a token of each."""

    def __init__(self, passes: int) -> None:
        self._begun, self._passes = 0, passes
        self.prefilled_s = 0.0

    @property
    def next_arrival_s(self) -> float | None:
        return None if self._begun == self._passes else 0.0

    def begin(self, now: float) -> int | None:
        if self._begun == self._passes:
            return None
        self._begun += 1
        return self._begun - 1

    def end(self, work: int, now: float) -> None:
        if work == 0:
            self.prefilled_s = now


class _DeviceStage(Stage[int]):
    """Runs passes of a group, whose phases are known."""

    def __init__(self, phases: Phases, passes: int) -> None:
        self._prefill_s, self._decode_s = phases.prefill_s, phases.decode_s / max(1, passes - 1)
        self._free = 0.0

    def run_pass(self, work: int, ready: float) -> tuple[float, float]:
        start = max(self._free, ready)
        self._free = start + (self._decode_s if work else self._prefill_s)
        return start, self._free


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
