"""The rank that schedules: it announces each pass to the others, runs the last stage, and samples.

The sequences that run are divided into groups, each with a scheduler and KV blocks of its own, and the passes of all
groups are under way at a time: while one group is in one stage, another is in the next. Where each rank has a part of
every matrix instead there is one group, and all ranks run the same pass at the same time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from engines.offload.backend.base import LoadRequest
from engines.offload.backend.choice import backend_for
from engines.offload.kernels import HostKernels
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.loaded_model import LoadedModel
from engines.offload.loader import load
from engines.offload.memory.storage import storages
from engines.offload.memory.tensor_shard import TensorShard, require_whole_groups
from engines.offload.model.meta_model import MetaModel
from engines.offload.model.stage import Stage
from engines.offload.model_runner import ModelRunner
from engines.offload.pipeline.clocks import Offset
from engines.offload.pipeline.cut import group_count
from engines.offload.pipeline.lane import COMPUTE, SEND, WAIT, Lane, LaneSpan, events, metrics
from engines.offload.pipeline.links import Command, Links, LostRankError
from engines.offload.pipeline.messages import PassMessage
from engines.offload.pipeline.processes import leading
from engines.offload.pipeline.ranks import Loaded, Ranks
from engines.offload.pipeline.rates import measured, rank_rates, stage_times
from engines.offload.pipeline.stages import Division, all_layers, equal_stages, timed_stages
from engines.offload.pipeline.started import ranks_share_host, require_ranks, world
from engines.offload.pipeline.wire import wire_of
from engines.offload.scheduled_chunk import logits_indices
from engines.offload.scheduled_pass import ScheduledPass, Share
from engines.offload.scheduler import Scheduler
from engines.offload.scoring import Scoring
from engines.offload.sequence import Generation
from engines.offload.timeline import STAGE_BEFORE
from harness.api import EngineTrace, HarnessError, TraceEvent, UnsupportedError
from harness.common.rank_network import is_linked

S = TypeVar("S", Generation, Scoring)


class PipelineRunner(ModelRunner):
    """Runs passes of a model whose last `stage` is `loaded` here.

    `why_lost` says more of a rank that is gone than who misses it knows. `groups`: of sequences, which share `blocks`
    KV blocks. `clocks`: of other ranks, which without one share the leader's.
    """

    def __init__(
        self, loaded: LoadedModel, kernels: HostKernels, links: Links, stage: Stage, groups: int, blocks: int,
        why_lost: Callable[[], str], clocks: Mapping[int, Offset],
    ) -> None:  # fmt: skip
        super().__init__(loaded, kernels, stage.first)
        loaded.meta_model.use_collectives(links)
        self._links, self._stage, self._clocks = links, stage, clocks
        self._why_lost = why_lost
        self._broken = False
        self._lane = Lane()
        self._moved = self._bytes()  # when the run began
        self._under_way: deque[int] = deque()  # rows of each pass that was announced and has not come back
        self._entered = 0.0
        loaded.timeline.under_way = groups
        loaded.timeline.clear()
        plan, policy = loaded.plan, loaded.policy
        offloaded = max(0, blocks - plan.kv_blocks)
        last = 0 if loaded.device.where.type == "cpu" else max(0, offloaded - plan.host_kv_blocks)
        part_policy = replace(policy, gpu_batch_size=-(-policy.gpu_batch_size // groups))
        part_plan = replace(plan, sequences=-(-plan.sequences // groups))
        self._shares = [
            Share(BlockManager(blocks, offloaded, last, part=(i, groups)), part_policy, part_plan)
            for i in range(groups)
        ]
        self._whole = Share(BlockManager(blocks, offloaded, last), policy, plan)  # of blocks that every rank has

    @property
    def shares(self) -> Sequence[Share]:
        return self._shares

    def close(self) -> None:
        """Lets the other ranks end too."""
        if not self._broken:
            with suppress(HarnessError):  # a rank that is lost by now has ended
                self._drain()
                self._links.announce(Command.END)
            self._broken = True
        super().close()

    def ranks(self) -> EngineTrace:
        """Of each rank R, as `rankR_busy_s` and so on: seconds at work, without work, and these as a share of the run;
        bytes that it sent, and bytes of weights that it read. Lanes cover what the timeline keeps."""
        if self._broken:
            return EngineTrace()
        low, high = self.loaded.timeline.window
        by_rank = metrics(0, self._lane.busy_s, self._lane.seconds)
        moved = [float(now - before) for now, before in zip(self._bytes(), self._moved, strict=True)]
        by_rank |= {"rank0_sent_bytes": moved[0], "rank0_weight_bytes_read": moved[1]}
        lanes: list[TraceEvent] = events(0, self._lane.within(low, high), low)
        for rank in self._links.followers:
            clock = self._clocks.get(rank, Offset())
            with self._naming_lost_rank():
                report = self._links.query(rank, Command.REPORT, [low + clock.seconds, high + clock.seconds])
            busy_s, sent, read, *spans = report
            by_rank |= metrics(rank, busy_s, self._lane.seconds)
            by_rank |= {f"rank{rank}_sent_bytes": sent, f"rank{rank}_weight_bytes_read": read}
            if rank in self._clocks:
                by_rank |= {f"rank{rank}_clock_offset_s": clock.seconds, f"rank{rank}_clock_error_s": clock.error_s}
            each = [LaneSpan(int(kind), a, b) for kind, a, b in zip(*[iter(spans)] * 3, strict=True)]
            lanes += events(rank, each, low + clock.seconds)
        return EngineTrace(by_rank, tuple(lanes))

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Lets all ranks count from here on, too."""
        if not self._broken:
            self._drain()
            self._lane.clear()
            self._moved = self._bytes()
            with self._naming_lost_rank():
                self._links.announce(Command.BEGIN)
        with super().one_run():
            try:
                yield
            finally:
                if not self._broken:
                    self._drain()

    @contextmanager
    def whole(self) -> Iterator[Share]:
        """All blocks as one scheduler's, and then the groups' again: neither finds what the other has cached."""
        self._forget_prefixes()
        try:
            yield self._whole
        finally:
            self._forget_prefixes()

    def begin_pass(self, scheduler: Scheduler[S], clock: Callable[[], float]) -> ScheduledPass[S]:
        if self._broken:
            raise HarnessError("a rank was lost: load the model again")
        began = time.perf_counter()
        scheduled = super().begin_pass(scheduler, clock)
        ids = [token for chunk in scheduled.chunks for token in chunk.tokens]
        message = PassMessage(scheduled.batches, ids, [logits_indices(batch) for batch in scheduled.batches])
        formed = time.perf_counter()
        with self._naming_lost_rank():
            self._links.announce(Command.PASS, message.encoded())
        self._under_way.append(sum(message.rows))
        self._lane.add(COMPUTE, began, formed)
        self._lane.add(SEND, formed, time.perf_counter())
        return scheduled

    def end_pass(self, scheduled: ScheduledPass[S], clock: Callable[[], float]) -> list[tuple[S, bool]]:
        advanced = super().end_pass(scheduled, clock)
        self._lane.add(COMPUTE, self._entered, time.perf_counter())
        return advanced

    def _entering(self, scheduled: ScheduledPass[S]) -> list[torch.Tensor | None]:
        loaded, rows = self.loaded, [sum(chunk.count for chunk in batch) for batch in scheduled.batches]
        loaded.timeline.rest()  # other ranks compute
        began = time.perf_counter()
        hidden = self._receive_oldest()
        self._entered = time.perf_counter()
        loaded.timeline.add("wait", STAGE_BEFORE, began, self._entered)
        self._lane.add(WAIT, began, self._entered)
        return [None] * len(rows) if hidden is None else [loaded.device.upload(x) for x in torch.split(hidden, rows)]

    def _receive_oldest(self) -> torch.Tensor | None:
        """What enters this stage of the pass that has been under way for longest; None where the model begins here."""
        rows = self._under_way.popleft()
        if self._stage.is_first:
            return None
        with self._naming_lost_rank():
            return self._links.receive_hidden(rows, self.loaded.model.shape.hidden)

    def _bytes(self) -> tuple[int, int]:
        return self._links.bytes_sent, self.loaded.stream.bytes_read

    def _drain(self) -> None:
        """Takes what comes of passes that nobody will end, as a run was closed early: what they would have cached is
        not there, and later passes must not be given it."""
        if self._under_way:
            self._forget_prefixes()
        while self._under_way:
            self._receive_oldest()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nothing stays under way where what runs passes ends in the middle of one."""
        with super().exclusive():
            try:
                yield
            except BaseException:
                if not self._broken:
                    self._drain()
                raise

    def _reset(self) -> None:
        super()._reset()
        self._forget_prefixes()
        if not self._broken:
            self._drain()

    def _forget_prefixes(self) -> None:
        self.loaded.cache.reset_prefix_cache()
        for share in (*self._shares, self._whole):
            share.blocks.reset_prefix_cache()

    @contextmanager
    def _naming_lost_rank(self) -> Iterator[None]:
        """Says which rank was lost, and why. What is under way cannot be gone on with."""
        try:
            yield
        except LostRankError as exc:
            self._broken = True
            raise HarnessError(f"all ranks have ended: {self._why_lost() or exc}") from exc


class TensorRunner(PipelineRunner):
    """Runs passes of which every rank computes its part of every product."""

    def end_pass(self, scheduled: ScheduledPass[S], clock: Callable[[], float]) -> list[tuple[S, bool]]:
        try:
            with self._naming_lost_rank():
                return super().end_pass(scheduled, clock)
        except BaseException:
            self._broken = True  # the other ranks wait in the middle of it
            raise

    def _drain(self) -> None:
        """A pass that nobody ends has the other ranks wait in it."""
        self._broken |= bool(self._under_way)
        self._under_way.clear()


def runner_of_ranks(request: LoadRequest, resources: ExitStack, attention_units: int | None) -> PipelineRunner:
    """Loads a model on as many ranks as the policy has; `resources` end them. Raises as OffloadEngine.load does, naming
    the rank."""
    policy, threads = request.policy, torch.get_num_threads()
    require_ranks(policy.ranks)
    if request.limits.link is not None and (world() is not None or not is_linked()):
        raise UnsupportedError("limits.link_rate and link_delay: only `harness run` makes links; leave them out")
    if request.limits.gpu and ranks_share_host():
        name = "tensor" if policy.tensor > 1 else "pipeline"
        raise UnsupportedError(
            f"policy.{name}: the ranks of one host would share its device: leave limits.device_memory out, or start "
            "one rank on each host with torchrun"
        )
    equal = _equal(request)  # raises for what cannot be divided, before any process is started
    if not (world() is not None or policy.threads or request.limits.threads):
        threads = max(1, threads // policy.ranks)  # ranks that share this host share its cores
        torch.set_num_threads(threads)
    ranks = resources.enter_context(leading(policy.ranks, threads))
    host_kernels = HostKernels(request.job.cache, threads)
    resources.callback(host_kernels.close)
    if policy.compute_dtype == "auto":  # this rank's choice, as activations travel in it
        layers, outside, _ = storages(request.model.dtype, policy)
        with ExitStack() as trial:
            [gemms, *_] = backend_for(request, host_kernels, trial, attention_units).choose_gemms(layers, outside)
        request = replace(request, policy=replace(policy, compute_dtype=gemms[layers].dtype))
    division = _divided(request, ranks, equal, host_kernels)
    request = ranks.assign(request, division.stages)
    stage = division.stages[0]
    loaded = load(request, backend_for(request, host_kernels, resources, attention_units), host_kernels, resources)
    agreed = ranks.agree(Loaded.of(loaded))
    report = replace(loaded.report, notes=(*loaded.report.notes, *filter(None, [division.note])))
    plan = replace(loaded.plan, sequences=agreed.sequences, chunk=agreed.chunk)
    loaded = replace(loaded, plan=plan, report=report)
    longest, batch = request.job.max_sequence, min(policy.gpu_batch_size, agreed.sequences)
    stages = 1 if policy.tensor > 1 else len(ranks.order)
    groups = group_count(stages, agreed.blocks, longest, batch, agreed.streams)
    links = ranks.links(wire_of(policy, loaded.meta_model.dtype))
    clocks = {rank: links.clock(rank) for rank in links.followers if not ranks.shares_clock(rank)}
    kind = TensorRunner if policy.tensor > 1 else PipelineRunner
    runner = kind(loaded, host_kernels, links, stage, groups, agreed.blocks, ranks.why_lost, clocks)
    resources.callback(runner.close)
    return runner


def _equal(request: LoadRequest) -> Division:
    """What ranks have that are alike. Raises HarnessError or UnsupportedError for what cannot be divided so."""
    model, policy = request.model, request.policy
    if policy.tensor == 1:
        return equal_stages(model.shape, policy.pipeline)
    sharded = MetaModel(Path(model.path), model.shape, getattr(torch, model.dtype), tensor=TensorShard.under(policy, 0))
    require_whole_groups(sharded.matrices, storages(model.dtype, policy)[0])
    return all_layers(model.shape, policy.tensor)


def _divided(request: LoadRequest, ranks: Ranks, equal: Division, kernels: HostKernels) -> Division:
    """Which rank has what: the `equal` parts or stages, where each has a part of every matrix or ranks are alike or
    have devices; else stages by what the ranks measure. Tells them what is to be loaded."""
    measure = request.policy.tensor == 1 and not ranks.alike(request) and not request.limits.gpu
    ranks.tell(request, measure)
    if not measure:
        return equal
    with ExitStack() as trial:
        backend = backend_for(request, kernels, trial, None)
        rates = [measured(request, backend, kernels), *ranks.rates()]
        times = stage_times(request, backend)
    known = [each for each in rates if each is not None]
    if len(known) < len(rates):
        return replace(equal, note=f"equal stages, as the disk of rank {rates.index(None)} could not be measured")
    return timed_stages(times, rank_rates(ranks.machines, known, request))
