"""Forms passes: who runs, their KV blocks, what rows need besides tokens; ahead of time where that pays.

Source: NanoFlow (Zhu et al. 2025), section 5.3.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from engines.offload.kv_cache.attention import AttentionContext, PackedAttention
from engines.offload.loaded_model import LoadedModel
from engines.offload.model.layer_products import PackedBatch
from engines.offload.scheduled_chunk import ActiveSequence, ScheduledChunk, logits_indices, split
from engines.offload.scheduled_pass import BatchMetadata, ScheduledPass
from engines.offload.scheduler import Scheduler

S = TypeVar("S", bound=ActiveSequence)


def forms_ahead(loaded: LoadedModel, threads: int) -> bool:
    """Whether passes are formed ahead. Everywhere but

    - where there are other ranks, which are told of a pass with its tokens;
    - on a host where nothing would compute meanwhile, as no pool multiplies the last matrix, or one of a single thread:
      then it saves nothing, and costs the passes that do not hold.

    `threads`: of the host's pool.
    """
    if not loaded.policy.async_scheduling or loaded.policy.ranks > 1:
        return False
    last = loaded.gemms[loaded.tiles[-1].stored]
    return loaded.device.where.type != "cpu" or (last.pool is not None and threads > 1)


class PassFormer:
    """Forms passes of a `loaded` model, whose attention has `context`.

    A pass that is formed ahead counts on every sequence to go on that has steps left. Where one ends by its last token,
    is cancelled or comes meanwhile, the pass is formed again: that takes what it would have taken anyway, and no row is
    computed in vain.
    """

    def __init__(self, loaded: LoadedModel, context: AttentionContext, threads: int) -> None:
        self._loaded = loaded
        self._context = context
        self._forms_ahead = forms_ahead(loaded, threads)
        self._ahead: ScheduledPass[Any] | None = None

    def form(self, scheduler: Scheduler[S], now_s: float) -> ScheduledPass[S]:
        """The next pass, without batches where nobody can run."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.scheduler is scheduler and ahead.changes == scheduler.changes:
            self._loaded.counts.formed_ahead += 1
            return ahead
        return self._form(scheduler, now_s, ahead=False)

    def forget(self) -> None:
        """Forgets the pass that was formed ahead, and its sequences."""
        self._ahead = None

    def look_ahead(self, scheduled: ScheduledPass[S], now_s: float) -> None:
        """What needs none of a pass's logits, while its last matrix is multiplied: its sequences advance, those without
        steps left end, the next pass is formed where that pays, and the one before is summed up."""
        scheduled.generating = frozenset(scheduled.scheduler.advance(scheduled.chunks))
        if self._forms_ahead:
            following = self._form(scheduled.scheduler, now_s, ahead=True)
            if following.batches and self._loaded.cache.offloaded is None:  # else blocks get their places as it begins
                following.metadata = self._metadata(following)
            self._ahead = following if following.batches else None
        self._loaded.settle()

    def pack(self, scheduled: ScheduledPass[S], entering: Sequence[torch.Tensor | None]) -> list[PackedBatch]:
        """The batches of a pass that begins; `entering`: see PackedBatch.hidden."""
        self._loaded.cache.begin(scheduled.batches)
        metadata = scheduled.metadata or self._metadata(scheduled)
        ids = [torch.tensor([t for chunk in batch for t in chunk.tokens]) for batch in scheduled.batches]
        return [PackedBatch(i, *each, hidden) for i, each, hidden in zip(ids, metadata, entering, strict=True)]

    def _form(self, scheduler: Scheduler[S], now_s: float, ahead: bool) -> ScheduledPass[S]:
        counts, before = self._loaded.counts, (scheduler.prefix_hit_tokens, scheduler.preemptions)
        whole = scheduler.next_pass(now_s, ahead)
        counts.prefix_hit_tokens += scheduler.prefix_hit_tokens - before[0]
        counts.preemptions += scheduler.preemptions - before[1]
        policy = self._loaded.policy
        nano = policy.nano_count, policy.nano_order, policy.cpu_attention
        batches = [part for batch in whole for part in split(batch, *nano)]
        return ScheduledPass(scheduler, batches, scheduler.changes)

    def _metadata(self, scheduled: ScheduledPass[S]) -> list[BatchMetadata]:
        return [self._of_batch(batch, number) for number, batch in enumerate(scheduled.batches)]

    def _of_batch(self, batch: Sequence[ScheduledChunk[S]], number: int) -> BatchMetadata:
        positions = [at for chunk in batch for at in range(chunk.cached, chunk.cached + chunk.count)]
        upload = self._loaded.device.upload
        return BatchMetadata(
            upload(torch.tensor(positions)),
            upload(torch.tensor(logits_indices(batch), dtype=torch.long)),
            PackedAttention(self._context, batch, number),
        )
