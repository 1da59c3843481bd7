"""What one scheduler schedules with, and a pass that it has formed and that has not ended."""

from dataclasses import dataclass
from typing import Generic, TypeVar

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


@dataclass(frozen=True)
class Flight(Generic[S]):
    """A pass that was begun: the batches that `scheduler` formed."""

    scheduler: Scheduler[S]
    batches: list[list[ScheduledChunk[S]]]
    began_s: float
