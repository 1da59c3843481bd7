"""Runs sequences through passes of a loaded model until they are done."""

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch

from engines.offload.executor import Executor
from engines.offload.kv_cache.attention import AttentionContext, PackedAttention
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.model.meta_model import PackedBatch
from engines.offload.prefill_budget import make_scheduler
from engines.offload.scheduler import ScheduledChunk, Scheduler, split
from engines.offload.sequence import Generation, Scoring
from harness.api import HarnessError

S = TypeVar("S", Generation, Scoring)


class ModelRunner:
    """The `loaded` model at work: schedules passes, packs their batches, hands each sequence its logits."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._executor = Executor(loaded)
        self._attention = AttentionContext(
            cache=loaded.cache,
            kernel=loaded.attention,
            timeline=loaded.timeline,
            device=loaded.device,
            run=self._executor.attend,
            value_topk=loaded.policy.value_sparsity,
            hadamard=loaded.hadamard,
        )
        self._busy = False

    def run(
        self, sequences: Sequence[S], prefill_chunk: int | None = None, max_logits: int | None = None
    ) -> Iterator[S]:
        """Yields each sequence when it is done. Per pass, a batch computes at most `prefill_chunk` prompt tokens and at
        most `max_logits` rows of logits.

        Raises HarnessError if another run is active. Closing the iterator early frees the run's KV blocks.
        """
        if self._busy:
            raise HarnessError("engine offload runs one generation at a time: finish or close the current one")
        if not sequences:
            return
        loaded = self.loaded
        loaded.timeline.clear()
        began = time.perf_counter()
        chunk = min(prefill_chunk or loaded.plan.chunk, loaded.plan.chunk)
        scheduler = make_scheduler(
            sequences, loaded.cache, loaded.policy, loaded.plan, loaded.io_compute_balance_rows, chunk, max_logits
        )
        self._busy = True
        try:
            while (arrival := scheduler.next_arrival_s) is not None:
                now = time.perf_counter() - began
                if arrival > now:
                    time.sleep(arrival - now)
                    continue
                batches = [p for b in scheduler.next_pass(now) for p in split(b, loaded.policy.nano_batches)]
                if not batches:
                    raise HarnessError("no sequence can continue: the KV cache is too small for the admitted sequences")
                try:
                    done = self._pass(scheduler, batches, began)
                except BaseException:
                    self._reset()
                    raise
                yield from done
        finally:
            loaded.timeline.shared_tokens = scheduler.shared_tokens
            scheduler.close()
            self._busy = False

    def require_blocks(self, what: str, tokens: int) -> None:
        """Raises HarnessError naming `what` if the cache can never hold its `tokens` tokens."""
        blocks = self.loaded.cache.num_blocks
        if blocks_for(tokens) > blocks:
            raise HarnessError(
                f"{what}: its {tokens} tokens can never fit a cache of {blocks} blocks; "
                "give the engine more memory or shorten it"
            )

    def _pass(self, scheduler: Scheduler[S], batches: list[list[ScheduledChunk[S]]], began: float) -> list[S]:
        """Runs one pass over the layers; returns the sequences that end with it."""
        loaded = self.loaded
        chunks = list(chain.from_iterable(batches))
        for chunk in chunks:
            if chunk.sequence.start_s < 0:
                chunk.sequence.start_s = time.perf_counter() - began
        loaded.cache.begin(chunks, len(batches))
        with torch.inference_mode():
            logits = self._executor.run([self._pack(batch) for batch in batches])
            logits = [loaded.device.download(rows) for rows in logits]
            loaded.timeline.end_pass(sum(chunk.count for chunk in chunks))
            now = time.perf_counter() - began
            done = []
            for batch, rows in zip(batches, logits, strict=True):
                counts = [len(chunk.sequence.logits_positions(chunk.count)) for chunk in batch]
                for chunk, chunk_rows in zip(batch, torch.split(rows, counts), strict=True):
                    sequence = chunk.sequence
                    sequence.cached += chunk.count
                    if sequence.consume(chunk_rows, now):
                        scheduler.finish(sequence)
                        done.append(sequence)
        return done

    def _pack(self, batch: Sequence[ScheduledChunk[S]]) -> PackedBatch:
        ids: list[int] = []
        positions: list[int] = []
        logits_indices: list[int] = []
        for chunk in batch:
            sequence, start = chunk.sequence, chunk.cached
            logits_indices += [len(ids) + at - start for at in sequence.logits_positions(chunk.count)]
            ids += sequence.tokens[start : start + chunk.count]
            positions += range(start, start + chunk.count)
        upload = self.loaded.device.upload
        return PackedBatch(
            torch.tensor(ids),
            upload(torch.tensor(positions)),
            upload(torch.tensor(logits_indices, dtype=torch.long)),
            PackedAttention(self._attention, batch),
        )

    def _reset(self) -> None:
        """Recovers from a failed pass, whose KV blocks the prefix cache already lists as filled."""
        loaded = self.loaded
        if loaded.cache.host_attention is not None:
            loaded.cache.host_attention.settle()
        loaded.cache.reset_prefix_cache()
        if loaded.activation_offload is not None:
            loaded.activation_offload.reset()
