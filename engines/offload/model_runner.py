"""Runs sequences through passes of a loaded model until they are done."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from engines.offload.executor import Executor
from engines.offload.kernels import HostKernels
from engines.offload.kv_cache.attention import AttentionContext
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.pass_forming import PassFormer
from engines.offload.pass_model import PassModel
from engines.offload.prefill_budget import PrefillBudget, job_budget
from engines.offload.scheduled_pass import ScheduledPass, Share
from engines.offload.scheduler import Scheduler
from engines.offload.scoring import Scoring
from engines.offload.sequence import Generation
from harness.api import EngineTrace, GenerationRequest, HarnessError, InfeasibleError

S = TypeVar("S", Generation, Scoring)


class ModelRunner:
    """The `loaded` model at work: has passes formed and run, hands each sequence its logits.

    `kernels` end with it, before any weight goes: a late thread of their pool may still read one. `first_layer`: the
    model's number of the first layer that is loaded.
    """

    def __init__(self, loaded: LoadedModel, kernels: HostKernels, first_layer: int = 0) -> None:
        self.loaded = loaded
        self._kernels = kernels
        self._executor = Executor(loaded)
        attention = AttentionContext(
            cache=loaded.cache,
            kernel=loaded.attention,
            kernel_beside=loaded.attention_beside,
            timeline=loaded.timeline,
            device=loaded.device,
            run=self._executor.attend,
            value_topk=loaded.policy.value_sparsity,
            hadamard=loaded.hadamard,
            first_layer=first_layer,
        )
        self._former = PassFormer(loaded, attention, kernels.threads)
        self.pass_model = PassModel()
        self._busy = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While passes of one scheduler run. Raises HarnessError if those of another do."""
        if self._busy:
            raise HarnessError("engine offload runs one generation at a time: finish or close the current one")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Lets the timeline tell of the passes from here on; keeps the counts of experts at the end."""
        timeline, before = self.loaded.timeline, self.loaded.counts.prefix_hit_tokens
        self.loaded.settle()
        timeline.clear()
        try:
            yield
        finally:
            self._former.forget()
            self.loaded.settle()
            timeline.prefix_hit_tokens = self.loaded.counts.prefix_hit_tokens - before
            self.loaded.expert_counts.keep()

    def job_budget(self, work: Sequence[tuple[Sequence[int], int]], prefill_chunk: int, share: Share) -> PrefillBudget:
        """The prefill budget with which a scheduler of a `share` does a job of `work` (known tokens, steps) best."""
        balance = self.loaded.io_compute_balance_rows
        return job_budget(work, share.blocks.num_blocks, share.policy, share.plan, balance, prefill_chunk)

    def require_request(self, request: GenerationRequest) -> None:
        """Raises HarnessError for a request that the model cannot run, InfeasibleError for one that the cache can never
        hold."""
        request.require_valid(self.loaded.model.shape)
        self.require_blocks(f"request {request.id}", len(request.prompt) + request.sampling.max_tokens - 1)

    def require_blocks(self, what: str, tokens: int) -> None:
        """Raises InfeasibleError naming `what` if the cache can never hold its `tokens` tokens."""
        blocks = min(self.loaded.cache.max_blocks_per_sequence, *(share.blocks.num_blocks for share in self.shares))
        if blocks_for(tokens) > blocks:
            raise InfeasibleError(
                f"{what}: its {tokens} tokens can never fit a cache of {blocks} blocks; "
                "give the engine more memory or shorten it"
            )

    @property
    def shares(self) -> Sequence[Share]:
        """What schedulers schedule with; the passes of all are under way at a time."""
        return [Share(self.loaded.cache, self.loaded.policy, self.loaded.plan)]

    @contextmanager
    def whole(self) -> Iterator[Share]:
        """All KV blocks for one scheduler."""
        yield Share(self.loaded.cache, self.loaded.policy, self.loaded.plan)

    def close(self) -> None:
        """Ends the kernels' threads. Idempotent."""
        self._executor.close()
        if self.loaded.host_experts is not None:  # of a pass that failed, its thread may still multiply on the pool
            self.loaded.host_experts.close()
        self._kernels.close()

    def ranks(self) -> EngineTrace:
        """What each rank did in the last run, in numbers and as a lane; nothing where there is only this one."""
        return EngineTrace()

    def run_pass(self, scheduler: Scheduler[S], clock: Callable[[], float]) -> list[tuple[S, bool]]:
        """Forms and runs one pass over the layers; `clock` gives the times of sequences.

        Returns the sequences that generated a token or are done, and whether they are.
        """
        return self.end_pass(self.begin_pass(scheduler, clock), clock)

    def begin_pass(self, scheduler: Scheduler[S], clock: Callable[[], float]) -> ScheduledPass[S]:
        """Forms a pass, where that was not done while the last one computed."""
        began = time.monotonic()
        scheduled = self._former.form(scheduler, clock())
        scheduled.began_s = began
        if not scheduled.batches:
            raise HarnessError("no sequence can continue: the KV cache is too small for the admitted sequences")
        for chunk in scheduled.chunks:
            if chunk.sequence.start_s < 0:
                chunk.sequence.start_s = clock()
        return scheduled

    def end_pass(self, scheduled: ScheduledPass[S], clock: Callable[[], float]) -> list[tuple[S, bool]]:
        """Runs a pass that was begun; returns as `run_pass`."""
        counts = self.loaded.counts
        try:
            advanced = self._run(scheduled, clock)
        except BaseException:
            self._reset()
            raise
        seconds = time.monotonic() - scheduled.began_s
        counts.passes += 1
        counts.rows += scheduled.rows
        counts.pass_s += seconds
        self.pass_model.observe(scheduled.rows, seconds)
        return advanced

    def _entering(self, scheduled: ScheduledPass[S]) -> list[torch.Tensor | None]:
        """What enters the loaded layers, of each batch [tokens, hidden]; None where they begin with the embedding."""
        return [None] * len(scheduled.batches)

    def _run(self, scheduled: ScheduledPass[S], clock: Callable[[], float]) -> list[tuple[S, bool]]:
        loaded, scheduler, batches = self.loaded, scheduled.scheduler, scheduled.batches
        entering = self._entering(scheduled)
        loaded.check_tables()
        counts = [[len(chunk.sequence.logits_positions(chunk.count)) for chunk in batch] for batch in batches]
        with torch.inference_mode():
            packed = self._former.pack(scheduled, entering)
            loaded.timeline.begin_pass()
            logits = self._executor.run(packed, lambda: self._former.look_ahead(scheduled, clock()))
            logits = [loaded.device.download(rows) for rows in logits]
            loaded.timeline.close_pass(scheduled.rows)
            now = clock()
            advanced = []
            for batch, rows, each in zip(batches, logits, counts, strict=True):
                for chunk, chunk_rows in zip(batch, torch.split(rows, each), strict=True):
                    sequence = chunk.sequence
                    done = sequence.consume(chunk_rows, now)
                    if done and sequence.steps_left:  # without, it has left already
                        scheduler.finish(sequence)
                    if sequence in scheduled.generating:
                        advanced.append((sequence, done))
        if scheduler.next_arrival_s is None:
            loaded.timeline.rest()
        return advanced

    def _reset(self) -> None:
        """Recovers from a failed pass, whose KV blocks the prefix cache may list as filled."""
        loaded = self.loaded
        self._former.forget()
        if loaded.cache.host_attention is not None:
            loaded.cache.host_attention.settle()
        loaded.cache.reset_prefix_cache()
        if loaded.activation_offload is not None:
            loaded.activation_offload.reset()
