"""What one scheduler schedules with, and a pass that it has formed and that has not ended."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import torch

from engines.offload.kv_cache.attention import PackedAttention
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.plan import MemoryPlan
from engines.offload.scheduled_chunk import ActiveSequence, ScheduledChunk
from engines.offload.scheduler import Scheduler
from harness.api import OffloadPolicy

S = TypeVar("S", bound=ActiveSequence)


@dataclass(frozen=True)
class Share:
    """What one scheduler schedules with: KV blocks, and the policy and plan by which it forms passes."""

    blocks: BlockManager
    policy: OffloadPolicy
    plan: MemoryPlan


def blocks_by_tier(shares: Sequence[Share]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """KV blocks of several shares by tier: those that sequences hold, and all."""
    used = zip(*(share.blocks.num_used for share in shares), strict=True)
    there = zip(*(share.blocks.sizes for share in shares), strict=True)
    return tuple(map(sum, used)), tuple(map(sum, there))


class BatchMetadata(NamedTuple):
    """All that a batch's rows need besides their tokens: positions [tokens] and the indices of those whose logits are
    needed, where the model computes, and their attention."""

    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: PackedAttention


@dataclass
class ScheduledPass(Generic[S]):
    """A pass that was formed: the batches of `scheduler`, after so many `changes` there.

    `metadata`: of each batch, where it is built already. `began_s`: when the pass began. `generating`: the sequences
    that get a token of it, once they have advanced.
    """

    scheduler: Scheduler[S]
    batches: list[list[ScheduledChunk[S]]]
    changes: int
    metadata: Sequence[BatchMetadata] = ()
    began_s: float = 0.0
    generating: Collection[S] = ()

    @property
    def chunks(self) -> list[ScheduledChunk[S]]:
        """Those of all batches."""
        return list(chain.from_iterable(self.batches))

    @property
    def rows(self) -> int:
        """Tokens of all batches."""
        return sum(chunk.count for chunk in self.chunks)
