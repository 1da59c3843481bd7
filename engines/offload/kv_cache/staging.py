"""Which offloaded KV blocks a pass stages, in which slots, and in what contiguous runs they are copied."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """`count` blocks that are contiguous where they live, from `block` on, and where they are staged, from `slot`
    on."""

    block: int
    slot: int
    count: int


def staging(
    num_blocks: int, filled: Iterable[int], written: Iterable[int], longest: int, per_piece: int = 1 << 62
) -> tuple[torch.Tensor, list[Run], list[Run]]:
    """Stages the `filled` blocks that a pass reads and the `written` ones, of `num_blocks` offloaded blocks.

    Returns each block's slot, int64 [blocks], what is read before attention, and what is written back after it. A run
    has at most `longest` blocks and does not cross from one piece of `per_piece` blocks to the next.
    """
    read, write = set(filled), set(written)
    order = sorted(read | write)
    slots = torch.zeros(num_blocks, dtype=torch.long)
    slots[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    slot_of = {block: slot for slot, block in enumerate(order)}
    reads, writes = ([*_runs(sorted(blocks), slot_of, longest, per_piece)] for blocks in (read, write))
    return slots, reads, writes


def _runs(blocks: Sequence[int], slot_of: Mapping[int, int], longest: int, per_piece: int) -> Iterable[Run]:
    contiguous = itertools.groupby(
        enumerate(blocks), key=lambda pair: (pair[1] - pair[0], slot_of[pair[1]] - pair[0], pair[1] // per_piece)
    )
    for _, group in contiguous:
        run = [block for _, block in group]
        for i in range(0, len(run), longest):
            yield Run(run[i], slot_of[run[i]], len(run[i : i + longest]))
