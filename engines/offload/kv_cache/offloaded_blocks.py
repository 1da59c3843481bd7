"""KV blocks that live elsewhere and are staged where attention computes: disk_blocks.py and host_blocks.py."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.offload.memory.kv_blocks import STAGES


@dataclass(frozen=True)
class Run:
    """`count` blocks that are contiguous where they live, from `block` on, and where they are staged, from `slot`
    on."""

    block: int
    slot: int
    count: int


class OffloadedBlocks(ABC):
    """`num_blocks` blocks of `layers` layers, those that a pass needs staged layer by layer.

    A layer is staged while the one before is attended to, and written back behind attention; its stage then serves the
    layer after the next. Without `ahead` it is staged when attention asks for it, and written before `done` returns.
    A copy does not cross from one piece of `per_piece` blocks to the next. `bytes_read` and `bytes_written` count what
    was copied. `direct`: by direct I/O, if from disk.
    """

    direct = True
    _stages: torch.Tensor  # [STAGES, ...]

    def __init__(self, num_blocks: int, layers: int, ahead: bool, per_piece: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_read = self.bytes_written = 0
        self._layers = layers
        self._ahead = ahead
        self._per_piece = per_piece
        self._begun = 0  # layers of this pass that are staged, or on their way
        self._read: Sequence[Run] = ()
        self._write: Sequence[Run] = ()

    def start(self, filled: Iterable[int], written: Iterable[int]) -> torch.Tensor:
        """Begins a pass that reads the `filled` blocks and writes the `written` ones. Returns int64 [blocks]: the slot
        in which each is staged."""
        read, write = set(filled), set(written)
        order = sorted(read | write)
        slot_of = {block: slot for slot, block in enumerate(order)}
        self._read, self._write = (list(self._runs(sorted(blocks), slot_of)) for blocks in (read, write))
        self._begun = 0
        for _ in range(min(STAGES, self._layers) if self._ahead else 0):
            self._stage_next()
        slots = torch.zeros(self.num_blocks, dtype=torch.long)
        slots[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
        return slots

    def staged(self, layer: int) -> torch.Tensor:
        """The records of this pass's blocks in a layer, by slot: `num_blocks`, as bytes or as the values they store.
        Blocks until they are there."""
        if layer == self._begun:
            self._stage_next()
        self._wait(layer)
        return self._stages[layer % STAGES]

    def done(self, layer: int) -> None:
        """Every batch of the pass has attended in a layer."""
        self._write_back(layer)
        if self._ahead and self._begun < self._layers:
            self._stage_next()

    @abstractmethod
    def _stage(self, layer: int) -> None:
        """Begins to copy the runs to read to their slots."""

    @abstractmethod
    def _wait(self, layer: int) -> None:
        """Lets attention wait until a layer is staged."""

    @abstractmethod
    def _write_back(self, layer: int) -> None:
        """Begins to copy the runs to write back; without `ahead` returns when they are there."""

    def _stage_next(self) -> None:
        self._stage(self._begun)
        self._begun += 1

    def _runs(self, blocks: Sequence[int], slot_of: Mapping[int, int]) -> Iterable[Run]:
        """Cuts sorted `blocks` where they or their slots are not contiguous, and between pieces."""
        by_run = itertools.groupby(
            enumerate(blocks), key=lambda at: (at[1] - at[0], slot_of[at[1]] - at[0], at[1] // self._per_piece)
        )
        for _, group in by_run:
            run = [block for _, block in group]
            yield Run(run[0], slot_of[run[0]], len(run))
