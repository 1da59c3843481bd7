"""Runs sequences through passes of a loaded model until they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from engines.offload.device.protocol import Device
from engines.offload.executor import Executor
from engines.offload.kernels import AttentionKernel, Hadamard
from engines.offload.kv_cache.attention import PackedAttention, Segment
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.plan import MemoryPlan
from engines.offload.model.activation_offload import ActivationOffload
from engines.offload.model.meta_model import PackedBatch
from engines.offload.prefill_budget import make_scheduler
from engines.offload.scheduler import ScheduledChunk, Scheduler, split
from engines.offload.sequence import ActiveSequence
from engines.offload.timeline import Timeline
from harness.api import HarnessError, OffloadPolicy

S = TypeVar("S", bound=ActiveSequence)


class Runtime:
    """A loaded model at work. `balance`: rows at which a pass computes as long as its weights take to load."""

    def __init__(
        self,
        executor: Executor,
        cache: PagedCache,
        kernel: AttentionKernel,
        policy: OffloadPolicy,
        plan: MemoryPlan,
        balance: int,
        timeline: Timeline,
        activation_offload: ActivationOffload | None = None,
        hadamard: Hadamard | None = None,
        device: Device | None = None,
        home: HostAttention | None = None,
    ) -> None:
        self._executor = executor
        self._device = device
        self._home = home
        self._activation_offload = activation_offload
        self._cache = cache
        self._kernel = kernel
        self._hadamard = hadamard
        self._policy = policy
        self._plan = plan
        self._balance = balance
        self.timeline = timeline
        self._busy = False

    def run(self, sequences: Sequence[S], chunk: int | None = None, heads: int | None = None) -> Iterator[S]:
        """Yields each sequence as it is done; at most `chunk` prompt tokens a batch and pass, of which at most `heads`
        meet the head.

        One run at a time: raises HarnessError for a second. A run that is given up frees what it held.
        """
        if self._busy:
            raise HarnessError("engine offload does one thing at a time: finish or close the generation in hand")
        if not sequences:
            return
        self.timeline.clear()
        began = time.perf_counter()
        most = min(chunk or self._plan.chunk, self._plan.chunk)
        scheduler = make_scheduler(sequences, self._cache, self._policy, self._plan, self._balance, most, heads)
        self._busy = True
        try:
            while (arrival := scheduler.next_arrival_s) is not None:
                now = time.perf_counter() - began
                if arrival > now:
                    time.sleep(arrival - now)
                    continue
                batches = [
                    part for batch in scheduler.next_pass(now) for part in split(batch, self._policy.nano_batches)
                ]
                if not batches:
                    raise HarnessError("no sequence can go on: the cache is too small for what was let in")
                try:
                    done = self._pass(scheduler, batches, began)
                except BaseException:
                    if self._home is not None:
                        self._home.settle()
                    self._cache.reset_prefix_cache()  # blocks were published that this pass should have filled
                    if self._activation_offload is not None:
                        self._activation_offload.forget()
                    raise
                yield from done
        finally:
            self.timeline.shared_tokens = scheduler.shared_tokens
            scheduler.close()
            self._busy = False

    def require_blocks(self, what: str, tokens: int) -> None:
        """Raises HarnessError naming `what` if its `tokens` can never be cached."""
        if blocks_for(tokens) > self._cache.num_blocks:
            raise HarnessError(
                f"{what}: its {tokens} tokens can never fit a cache of {self._cache.num_blocks} blocks; "
                "give the engine more memory or shorten it"
            )

    def _pass(self, scheduler: Scheduler[S], batches: list[list[ScheduledChunk[S]]], began: float) -> list[S]:
        """One pass over the layers; the sequences that it ended."""
        for sequence in (p.sequence for batch in batches for p in batch):
            if sequence.start_s < 0:
                sequence.start_s = time.perf_counter() - began
        wanted = [[len(p.sequence.wanted(p.count)) for p in batch] for batch in batches]
        done = []
        parts = [(p.sequence.block_table, p.sequence.cached, p.count) for batch in batches for p in batch]
        self._cache.begin(parts, len(batches))
        with torch.inference_mode():
            logits = self._executor.run([self._pack(batch) for batch in batches])
            if self._device is not None:
                logits = [self._device.download(rows) for rows in logits]
            self.timeline.end_pass(sum(p.count for batch in batches for p in batch))
            now = time.perf_counter() - began
            for batch, counts, rows in zip(batches, wanted, logits, strict=True):
                for part, own in zip(batch, torch.split(rows, counts), strict=True):
                    part.sequence.cached += part.count
                    if part.sequence.consume(own, now):
                        scheduler.finish(part.sequence)
                        done.append(part.sequence)
        return done

    def _pack(self, batch: Sequence[ScheduledChunk[S]]) -> PackedBatch:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments = []
        for part in batch:
            sequence, start = part.sequence, part.sequence.cached
            rows += [len(ids) + position - start for position in sequence.wanted(part.count)]
            ids += sequence.tokens[start : start + part.count]
            positions += range(start, start + part.count)
            segments.append(Segment(part.count, start, tuple(sequence.block_table)))
        keep, aside = self._policy.value_sparsity, self._executor.aside
        attention = PackedAttention(
            self._cache,
            segments,
            self._kernel,
            self.timeline,
            keep,
            aside,
            self._hadamard,
            self._device,
            self._home,
        )
        places, wanted = torch.tensor(positions), torch.tensor(rows, dtype=torch.long)
        if self._device is not None:
            places, wanted = self._device.upload(places), self._device.upload(wanted)
        return PackedBatch(torch.tensor(ids), places, wanted, attention)
