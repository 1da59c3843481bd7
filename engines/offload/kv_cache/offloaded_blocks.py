"""KV blocks that live elsewhere and are staged where attention computes: disk_blocks.py and lower_blocks.py."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.memory.kv_blocks import BLOCK_SIZE, STAGES, blocks_for


@dataclass(frozen=True)
class Run:
    """`count` blocks that are contiguous where they live, from `block` on, and where they are staged, from `slot`
    on."""

    block: int
    slot: int
    count: int


@dataclass(frozen=True)
class BatchTransfers:
    """What one batch of a pass moves in each layer: the runs to `read` and to `write`.

    `after`: the last batch before it that writes a block which this one reads; -1 where none does.
    """

    read: Sequence[Run]
    write: Sequence[Run]
    after: int


def filled_blocks(chunk: Chunk) -> Sequence[int]:
    """The blocks of the tokens before a chunk; the last one may be filled in part."""
    return chunk.block_table[: blocks_for(chunk.cached)]


def written_blocks(chunk: Chunk) -> Sequence[int]:
    """The blocks that a chunk's own tokens are written to."""
    return chunk.block_table[chunk.cached // BLOCK_SIZE : blocks_for(chunk.cached + chunk.count)]


def union(blocks: Sequence[set[int]], among: Iterable[int]) -> set[int]:
    """The blocks of those chunks."""
    return set().union(*(blocks[i] for i in among))


def divided(needs: Sequence[set[int]], slots: int) -> list[range]:
    """Cuts a batch where a stage of so many slots is full, into parts of consecutive chunks. `needs`: of each chunk the
    blocks."""
    parts, together = [0], set[int]()
    for number, blocks in enumerate(needs):
        if len(together | blocks) > slots and number > parts[-1]:
            parts.append(number)
            together = set()
        together |= blocks
    return [range(a, b) for a, b in itertools.pairwise([*parts, len(needs)])]


class OffloadedBlocks(ABC):
    """`num_blocks` blocks of `layers` layers, those that a batch needs staged a layer at a time.

    A batch's blocks of a layer are staged while the one before attends, and written back behind its attention; the
    stage, of `slots` blocks, then serves the next but one. So a layer of one batch is on its way at a time, not of
    all: FlexGen (Sheng et al. 2023), algorithm 1, loads a batch's cache so. A batch that needs more blocks is several
    here: the parts that `divided` cuts it into. Without `ahead` they are staged when
    attention asks for them, and written before `done` returns. `bytes_read` and `bytes_written` count what was copied.
    `direct`: by direct I/O, if from disk.
    """

    direct = True
    _stages: torch.Tensor  # [STAGES, ...]

    def __init__(self, num_blocks: int, layers: int, ahead: bool, slots: int) -> None:
        self.num_blocks = num_blocks
        self.slots = slots
        self.bytes_read = self.bytes_written = 0
        self._layers = layers
        self._ahead = ahead
        self._transfers: Sequence[BatchTransfers] = ()
        # by layer and, within it, batch: how many of this pass are staged or on their way, and have been attended to
        self._begun = self._done = 0

    def start(self, batches: Sequence[tuple[Iterable[int], Iterable[int]]]) -> list[torch.Tensor]:
        """Begins a pass, each batch of which reads some blocks and writes some. Returns for each int64 [blocks]: the
        slot in which each block is staged."""
        transfers: list[BatchTransfers] = []
        slots: list[torch.Tensor] = []
        writer: dict[int, int] = {}  # by block, the last batch that writes it
        for number, (filled, written) in enumerate(batches):
            read, write = set(filled), set(written)
            order = sorted(read | write)
            assert len(order) <= self.slots
            slot_of = {block: slot for slot, block in enumerate(order)}
            to_read, to_write = (list(self._runs(sorted(blocks), slot_of)) for blocks in (read, write))
            after = max((writer.get(block, -1) for block in read), default=-1)
            transfers.append(BatchTransfers(to_read, to_write, after))
            writer |= dict.fromkeys(write, number)
            staged = torch.zeros(self.num_blocks, dtype=torch.long)
            staged[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
            slots.append(staged)
        self._transfers = transfers
        self._begun = self._done = 0
        self._stage_ahead()
        return slots

    def staged(self, layer: int, batch: int) -> torch.Tensor:
        """The records of a batch's blocks in a layer, by slot: `slots`, as bytes or as the values they store. Blocks
        until they are there. A pass asks by layer and, within it, batch."""
        number = layer * len(self._transfers) + batch
        while self._begun <= number:
            self._stage_next()
        self._wait(number)
        return self._stages[number % STAGES]

    def done(self, layer: int, batch: int) -> None:
        """A batch has attended in a layer."""
        number = layer * len(self._transfers) + batch
        self._write_back(number)
        self._done = number + 1
        self._stage_ahead()

    @abstractmethod
    def _stage(self, number: int) -> None:
        """Begins to copy the runs to read to their slots. `number` counts the pass's layers of batches, and `_of` says
        which one it is."""

    @abstractmethod
    def _wait(self, number: int) -> None:
        """Lets attention wait until they are staged."""

    @abstractmethod
    def _write_back(self, number: int) -> None:
        """Begins to copy the runs to write back; without `ahead` returns when they are there."""

    @abstractmethod
    def _piece(self, block: int) -> int:
        """The piece that a block lies in: no copy crosses from one to the next."""

    def _of(self, number: int) -> tuple[int, BatchTransfers]:
        """Layer and batch."""
        layer, batch = divmod(number, len(self._transfers))
        return layer, self._transfers[batch]

    def _stage_ahead(self) -> None:
        """Stages what has a free stage and needs nothing that an earlier batch of its layer has yet to write."""
        batches = len(self._transfers)
        while self._ahead and self._begun < min(self._layers * batches, self._done + STAGES):
            layer, batch = divmod(self._begun, batches)
            after = self._transfers[batch].after
            if after >= 0 and layer * batches + after >= self._done:
                return
            self._stage_next()

    def _stage_next(self) -> None:
        self._stage(self._begun)
        self._begun += 1

    def _runs(self, blocks: Sequence[int], slot_of: Mapping[int, int]) -> Iterable[Run]:
        """Cuts sorted `blocks` where they or their slots are not contiguous, and between pieces."""
        by_run = itertools.groupby(
            enumerate(blocks), key=lambda at: (at[1] - at[0], slot_of[at[1]] - at[0], self._piece(at[1]))
        )
        for _, group in by_run:
            run = [block for _, block in group]
            yield Run(run[0], slot_of[run[0]], len(run))
