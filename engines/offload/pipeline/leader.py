"""The rank that schedules: it announces each pass to the others, runs the last stage, and samples.

The sequences that run are divided into groups, each with a scheduler and KV blocks of its own, and the passes of all
groups are under way at a time: while one group is in one stage, another is in the next.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from engines.offload.backend.base import LoadRequest
from engines.offload.backend.choice import backend_for
from engines.offload.flight import Flight, Share
from engines.offload.kernels import HostKernels
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.loaded_model import LoadedModel
from engines.offload.loader import load
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.storage import storages
from engines.offload.model.stage import Stage
from engines.offload.model_runner import ModelRunner
from engines.offload.pipeline.follower import REPORTED
from engines.offload.pipeline.links import END, PASS, Links, LostRankError
from engines.offload.pipeline.messages import PassMessage
from engines.offload.pipeline.processes import Loaded, leading, started_by_torchrun
from engines.offload.pipeline.stages import stages
from engines.offload.scheduler import Scheduler
from engines.offload.scoring import Scoring
from engines.offload.sequence import Generation
from harness.api import HarnessError

S = TypeVar("S", Generation, Scoring)


class PipelineRunner(ModelRunner):
    """Runs passes of a model whose last `stage` is `loaded` here.

    `why_lost` says more of a rank that is gone than who misses it knows. `groups`: of sequences, which share `blocks`
    KV blocks.
    """

    def __init__(
        self, loaded: LoadedModel, kernels: HostKernels, links: Links, stage: Stage, groups: int, blocks: int,
        why_lost: Callable[[], str],
    ) -> None:  # fmt: skip
        super().__init__(loaded, kernels, stage.first)
        self._links = links
        self._why_lost = why_lost
        self._broken = False
        plan, policy = loaded.plan, loaded.policy
        offloaded = max(0, blocks - plan.kv_blocks)
        last = 0 if loaded.device.where.type == "cpu" else max(0, offloaded - plan.host_kv_blocks)
        part_policy = replace(policy, gpu_batch_size=-(-policy.gpu_batch_size // groups))
        part_plan = replace(plan, sequences=-(-plan.sequences // groups))
        self._shares = [
            Share(BlockManager(blocks, offloaded, last, part=(i, groups)), part_policy, part_plan)
            for i in range(groups)
        ]

    @property
    def shares(self) -> Sequence[Share]:
        return self._shares

    def close(self) -> None:
        """Lets the other ranks end too."""
        if not self._broken:
            self._links.announce(END)
            self._broken = True
        super().close()

    def metrics(self) -> dict[str, float]:
        """Of each other rank, as `rank1_busy_s` and so on; see follower.REPORTED."""
        if self._broken:
            return {}
        with self._naming():
            found = self._links.reports(len(REPORTED))
        return {f"rank{rank}_{name}": value for rank, values in enumerate(found, 1)
                for name, value in zip(REPORTED, values, strict=True)}  # fmt: skip

    @contextmanager
    def whole(self) -> Iterator[Share]:
        """All blocks as one scheduler's, and then the groups' again: neither finds what the other has cached."""
        self._forget_prefixes()
        try:
            with super().whole() as share:
                yield share
        finally:
            self._forget_prefixes()

    def begin_pass(self, scheduler: Scheduler[S], clock: Callable[[], float]) -> Flight[S]:
        if self._broken:
            raise HarnessError("the pipeline has lost a rank: load the model again")
        flight = super().begin_pass(scheduler, clock)
        ids = [t for b in flight.batches for c in b for t in c.sequence.tokens[c.cached : c.cached + c.count]]
        with self._naming():
            self._links.announce(PASS, PassMessage(flight.batches, ids).encoded())
        return flight

    def _entering(self, flight: Flight[S]) -> list[torch.Tensor | None]:
        loaded, rows = self.loaded, [sum(chunk.count for chunk in batch) for batch in flight.batches]
        began = time.perf_counter()
        with self._naming():
            hidden = self._links.receive_hidden(sum(rows), loaded.model.shape.hidden, loaded.meta_model.dtype)
        loaded.timeline.add("wait", "for the stage before", began, time.perf_counter())
        return [loaded.device.upload(part) for part in torch.split(hidden, rows)]

    def _reset(self) -> None:
        super()._reset()
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self.loaded.cache.reset_prefix_cache()
        for share in self._shares:
            share.blocks.reset_prefix_cache()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Says which rank was lost, and why. What is under way cannot be gone on with."""
        try:
            yield
        except LostRankError as exc:
            self._broken = True
            raise HarnessError(f"the pipeline has ended: {self._why_lost() or exc}") from exc


def group_count(ranks: int, blocks: int, longest: int, batch: int, streams: bool) -> int:
    """How many groups of sequences are under way: one for each rank, where each gets the blocks of a sequence of
    `longest` tokens and one of `batch` sequences.

    Where weights stream, a stage reads its own for each group's pass: as often as one machine would read all of them
    for one pass of everybody. One group then has all ranks read at the same time, each its part, ahead of the pass.
    """
    if streams:
        return 1
    return max(1, min(ranks, batch, blocks // blocks_for(longest)))


def pipeline_runner(request: LoadRequest, resources: ExitStack, attention_units: int | None) -> PipelineRunner:
    """Loads a model on `policy.pipeline` ranks; `resources` end them. Raises as OffloadEngine.load does, naming the
    rank."""
    policy, threads = request.policy, torch.get_num_threads()
    stages(request.model.shape, policy.pipeline)  # raises for too many, before any process is started
    if not (started_by_torchrun() or policy.threads or request.limits.threads):
        threads = max(1, threads // policy.pipeline)  # ranks that share this host share its cores
        torch.set_num_threads(threads)
    ranks = resources.enter_context(leading(policy.pipeline, threads))
    host_kernels = HostKernels(request.job.cache, threads)
    resources.callback(host_kernels.close)
    if policy.compute_dtype == "auto":  # this rank's choice, as activations travel in it
        layers, outside, _ = storages(request.model.dtype, policy)
        with ExitStack() as trial:
            [gemms, *_] = backend_for(request, host_kernels, trial, attention_units).choose_gemms(layers, outside)
        request = replace(request, policy=replace(policy, compute_dtype=gemms[layers].dtype))
    request = ranks.assign(request)
    stage = request.stage
    assert stage is not None
    loaded = load(request, backend_for(request, host_kernels, resources, attention_units), host_kernels, resources)
    agreed = ranks.agree(Loaded.of(loaded))
    loaded = replace(loaded, plan=replace(loaded.plan, sequences=agreed.sequences, chunk=agreed.chunk))
    longest, batch = request.job.max_sequence, min(policy.gpu_batch_size, agreed.sequences)
    groups = group_count(ranks.count, agreed.blocks, longest, batch, agreed.streams)
    runner = PipelineRunner(loaded, host_kernels, ranks.links(), stage, groups, agreed.blocks, ranks.why_lost)
    resources.callback(runner.close)
    return runner
