"""What the leader tells the other ranks of a pass, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch

from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.memory.kv_blocks import blocks_for


@dataclass(frozen=True)
class PassChunk:
    """A part of a sequence; see Chunk."""

    count: int
    cached: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class PassMessage:
    """A pass: its batches' chunks, the ids of all of their tokens, batch by batch, and the indices of each batch's
    tokens whose logits are computed."""

    batches: Sequence[Sequence[Chunk]]
    ids: Sequence[int]
    logits_indices: Sequence[Sequence[int]]

    @property
    def rows(self) -> list[int]:
        """Tokens of each batch."""
        return [sum(chunk.count for chunk in batch) for batch in self.batches]

    def encoded(self) -> torch.Tensor:
        """int32: the number of batches; of each the number of chunks; of each the number of logits; of each chunk its
        count, its cached tokens and its block table's length; all tables; the indices of logits; the ids."""
        chunks = [chunk for batch in self.batches for chunk in batch]
        tables = [list(chunk.block_table[: blocks_for(chunk.cached + chunk.count)]) for chunk in chunks]
        numbers = [len(self.batches), *map(len, self.batches), *map(len, self.logits_indices)]
        for chunk, table in zip(chunks, tables, strict=True):
            numbers += [chunk.count, chunk.cached, len(table)]
        numbers += chain(*tables, *self.logits_indices)
        return torch.tensor([*numbers, *self.ids], dtype=torch.int32)

    @classmethod
    def decoded(cls, numbers: torch.Tensor) -> PassMessage:
        """The inverse of `encoded`."""
        values = numbers.tolist()
        start = 1 + 2 * values[0]
        sizes, logits = values[1 : 1 + values[0]], values[1 + values[0] : start]
        heads = [values[start + 3 * i : start + 3 * i + 3] for i in range(sum(sizes))]
        ends = list(accumulate((length for _, _, length in heads), initial=start + 3 * len(heads)))
        chunks = [
            PassChunk(count, cached, values[a:b])
            for (count, cached, _), (a, b) in zip(heads, pairwise(ends), strict=True)
        ]
        cuts, marks = accumulate(sizes, initial=0), list(accumulate(logits, initial=ends[-1]))
        indices = [values[a:b] for a, b in pairwise(marks)]
        return cls([chunks[a:b] for a, b in pairwise(cuts)], values[marks[-1] :], indices)
