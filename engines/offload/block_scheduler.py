"""Forms passes of blocks of sequences in step (row, zigzag)."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.scheduled_chunk import ActiveSequence, Room, ScheduledChunk
from engines.offload.scheduler import Scheduler

S = TypeVar("S", bound=ActiveSequence)


class BlockScheduler(Scheduler[S]):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all of one have ended.

    A batch and pass compute at most `prefill_chunk` prompt tokens.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, batches: int, prefill_chunk: int,
        max_logits: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(waiting, cache, size, max_logits)
        self._batches = batches
        self._prefill_chunk = prefill_chunk
        self._block: list[list[S]] = []

    def next_pass(self, now_s: float, ahead: bool = False) -> list[list[ScheduledChunk[S]]]:
        if not self.running:
            if ahead:  # whoever comes until the block starts may still be in it
                return []
            while len(self.running) < self._size * self._batches and self.admit(now_s):
                pass
            running = list(self.running)
            self._block = [running[i : i + self._size] for i in range(0, len(running), self._size)]
        alive = [[s for s in batch if s in self.running] for batch in self._block]
        return self._allocate_blocks([self._chunks(batch) for batch in alive], ahead)

    def _chunks(self, batch: Sequence[S]) -> list[ScheduledChunk[S]]:
        """A token of each sequence that decodes, and up to `prefill_chunk` prompt tokens of the others."""
        room = Room(self._prefill_chunk, self._max_logits)
        counts = [room.take(sequence, decodes=sequence.missing == 1) for sequence in batch]
        return [ScheduledChunk(sequence, count) for sequence, count in zip(batch, counts, strict=True) if count]
