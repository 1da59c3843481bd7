"""Plans for our engine on several ranks without devices: each has some of the layers, and their passes run in simulated
time, with links between them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from engines.offload.memory.stage_times import stage_shape
from engines.offload.pipeline.cut import even_ends, group_count, int8_bytes, order_of
from engines.offload.pipeline.lane import COMPUTE, LaneSpan, events, metrics
from engines.planning.closed_form_planner import Prediction, bound
from engines.planning.host_planner import HostPlanner, JobTimes
from engines.planning.machine import Machine
from engines.planning.memory import TierBytes
from engines.planning.planned_job import PlannedJob
from engines.planning.simulator import PlacedModel, Simulator
from engines.planning.threads import scaled
from engines.planning.virtual_job import agreed_plan, run_job
from engines.planning.virtual_pipeline import PipelineUse, VirtualLink, Visit, stage_use
from harness.api import DTYPE_BYTES, EngineTrace, HardwareProfile, OffloadPolicy, RankLink


class HostPipelinePlanner(HostPlanner):
    """Plans equal stages on ranks that are alike.

    `profile`: what each rank has. `at_once`: how many ranks can compute at full speed at a time, where they share a
    host's cores. `link`: what connects them; None for the profile's. A policy is that of all ranks, as in a suite; the
    job's budget is each rank's.

    Raises HarnessError for more stages than layers, InfeasibleError as HostPlanner does.
    """

    def __init__(self, job: PlannedJob, profile: HardwareProfile, stages: int, at_once: float | None = None,
                 link: RankLink | None = None) -> None:  # fmt: skip
        ends = even_ends(job.shape, stages)
        super().__init__(job, profile)
        self.layers = [end - start for start, end in pairwise([0, *ends])]
        self.shape = stage_shape(job.shape, max(self.layers), is_last=True)  # the longest
        self._link = (profile.between, 0.0) if link is None else (link.rate and link.rate / 8, link.delay_s)
        self._at_once = stages if at_once is None else at_once
        shapes = [stage_shape(job.shape, n, k == stages - 1) for k, n in enumerate(self.layers)]
        # as of the engine's ranks: a pass is announced, and its hidden states leave each stage but the last
        wait_s = stages * self._link[1] if stages > 1 else None
        alike = {
            each: HostPlanner(replace(job, shape=each, counts=()), profile, wait_s) for each in dict.fromkeys(shapes)
        }
        self._stages = [alike[each] for each in shapes]
        # by a policy with the fractions of all ranks together: the one that says what each rank does
        self._asked: dict[OffloadPolicy, OffloadPolicy] = {}

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy itself if it fits every rank."""
        return policy if all(stage.runnable(_of_rank(policy)) for stage in self._stages) else None

    def with_fractions(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the fractions of all ranks together. Raises InfeasibleError as the engine does."""
        placed = self.placed_stages(policy)
        on_disk = sum(one.streamed_bytes for one in placed) / sum(tile.nbytes for one in placed for tile in one.tiles)
        last = self._stages[-1].with_fractions(_of_rank(policy))
        complete = replace(policy, weights=(0.0, 1 - on_disk, on_disk), cache=last.cache, activations=last.activations)
        self._asked[complete] = self._asked.get(policy, policy)
        return complete

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """By the closed form: the longest stage sets the pace, or the sum of all where one group is under way. Raises
        InfeasibleError for a policy that does not fit."""
        parts = [stage.estimate(_of_rank(policy)) for stage in self._stages]
        longest = max(parts, key=lambda part: part.block_latency_s)
        several = self._groups(policy, self.placed_stages(policy)) > 1
        seconds = longest.block_latency_s if several else sum(part.block_latency_s for part in parts)
        factor = seconds / longest.block_latency_s
        return replace(
            longest,
            throughput_tok_s=longest.throughput_tok_s / factor,
            prefill_s=longest.prefill_s * factor,
            decode_s=longest.decode_s * factor,
            block_latency_s=seconds,
        )

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """By running the job in virtual time. Raises InfeasibleError for a policy that does not fit."""
        one, placed = _of_rank(policy), self.placed_stages(policy)
        groups = self._groups(policy, placed)
        profile = self._profile_for(one)
        slowdown = min(1.0, self._at_once / min(groups, len(placed)))
        machine = Machine(replace(profile, host=scaled(profile.host, slowdown)))
        stages = [Simulator(each, one, machine) for each in placed]
        links = [VirtualLink(*self._link) for _ in placed]
        width, value_bytes = self.job.shape.hidden, DTYPE_BYTES[profile.host.dtype]
        row_bytes = width * value_bytes if policy.wire_bits is None else int8_bytes(width)
        together = agreed_plan(stages)[0].sequences
        times = JobTimes.of(self.job, one, together)
        visits = run_job(stages, times.sequences, links, groups, row_bytes)
        uses = [stage_use(visits, k, times.total_s, _used(stage)) for k, stage in enumerate(stages)]
        pipeline = PipelineUse(groups, self.layers, uses, max(link.busy_s for link in links))
        slowest, limit = pipeline.bottleneck
        busiest = uses[slowest].used
        host_s = busiest["products"] + busiest["attention"]
        own = "host" if host_s > busiest["disk"] else "disk"
        everything = _all_of(machine.profile, len(placed))
        return Prediction(
            requests=len(times.requests),
            together=together,
            throughput_tok_s=times.throughput_tok_s,
            prefill_s=times.prefill_s,
            decode_s=times.total_s - times.prefill_s,
            block_latency_s=times.block_s,
            bottleneck="network" if limit == "network" else own,
            bound=bound(self.job, one, Machine(everything), together),
            peak=TierBytes(0.0, max(float(each.plan.total_bytes) for each in placed),
                           max(float(each.disk_bytes) for each in placed)),
            used={"host": host_s, "disk": busiest["disk"]},
            trace=_trace(stages, visits, pipeline),
            pipeline=pipeline,
        )  # fmt: skip

    def read_share(self, policy: OffloadPolicy, rows: int) -> float:
        return self._stages[0].read_share(_of_rank(policy), rows)

    def placed_stages(self, policy: OffloadPolicy) -> list[PlacedModel]:
        """By stage, its layers as the engine would load them. Raises InfeasibleError as the engine does."""
        asked = _of_rank(self._asked.get(policy, policy))
        return [stage.placed(asked) for stage in self._stages]

    def _groups(self, policy: OffloadPolicy, placed: Sequence[PlacedModel]) -> int:
        blocks = min(each.plan.kv_blocks + each.plan.disk_kv_blocks for each in placed)
        batch = min(policy.gpu_batch_size, *(each.plan.sequences for each in placed))
        streams = any(any(each.streamed) for each in placed)
        return group_count(len(placed), blocks, self.job.max_sequence, batch, streams)


def _of_rank(policy: OffloadPolicy) -> OffloadPolicy:
    """What one rank does under a policy, with its own layers."""
    return replace(policy, pipeline=1, wire_bits=None)


def _used(stage: Simulator) -> dict[str, float]:
    """Seconds of a stage's resources."""
    tasks, load_s = stage.timeline.tasks, stage.timeline.load_s
    return {"products": tasks["task_products"], "attention": tasks["task_attention"], "disk": load_s}


def _all_of(profile: HardwareProfile, ranks: int) -> HardwareProfile:
    """The machines of all ranks as one."""
    host, disk = profile.host, profile.disk
    whole = replace(scaled(host, ranks), memory=ranks * host.memory)
    return replace(profile, host=whole, disk=replace(disk, capacity=ranks * disk.capacity, read=ranks * disk.read))


def _trace(stages: Sequence[Simulator], visits: Sequence[Visit], pipeline: PipelineUse) -> EngineTrace:
    """As a run's: what rank 0 did, and of each rank its seconds at work and its lane while the kept pass ran."""
    timeline = stages[-1].timeline
    own, (low, high) = timeline.trace(), timeline.window
    found, lanes = dict(own.metrics), list(own.events)
    for k, (rank, use) in enumerate(zip(order_of(len(stages)), pipeline.stages, strict=True)):
        found |= metrics(rank, use.busy_s, use.total_s)
        mine = [visit for visit in visits if visit.stage == k and visit.start_s < high and visit.end_s > low]
        spans = [LaneSpan(COMPUTE, max(low, visit.start_s), min(high, visit.end_s)) for visit in mine]
        lanes += events(rank, spans, low)
    return EngineTrace(found, tuple(lanes))
