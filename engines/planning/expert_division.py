"""Which experts the host is expected to multiply in a pass beside a device, and how long that takes it."""

from collections.abc import Sequence
from dataclasses import replace

from engines.offload.memory.expert_split import ExpertRates, ExpertSplit, held_experts
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile
from engines.planning.machine import Machine

#: Where a tile is.
ON_DEVICE, IN_MEMORY, ON_DISK = range(3)
#: Rows at which the host's rate of products is taken.
_ROWS = (1, 8, 64, 256)


def divided(
    tiles: Sequence[WeightTile], tiers: Sequence[int], needed: Sequence[float], usage: ExpertUsage, machine: Machine,
    rows: int, batches: int,
) -> tuple[frozenset[int], dict[str, float]]:  # fmt: skip
    """The tiles that the host multiplies in a pass of `rows` rows in so many batches, and its seconds by mixture.

    By tile, by its index: its tier, and the probability that it is `needed`. The rates are the link's, and
    the host's for products with weights that come from its memory.
    """
    expected = [replace(tile, nbytes=round(tile.nbytes * p)) for tile, p in zip(tiles, needed, strict=True)]
    held = held_experts(expected, [i for i, tier in enumerate(tiers) if tier == IN_MEMORY], usage)
    streamed = [tile for tile in expected if tiers[tile.index] != ON_DEVICE]
    experts = [tile for tile in tiles if tile.matrix in usage.experts]
    values = sum(tile.shape[0] * tile.shape[1] for tile in experts) / max(1, sum(tile.nbytes for tile in experts))
    host = Machine(replace(machine.profile, device=None, link=None))
    measured = [(n, max(1 / host.dense.bandwidth, 2 * n * values / host.flops(n))) for n in _ROWS]
    split = ExpertSplit(held, streamed, usage, ExpertRates(machine.link.h2d, measured))
    chosen = split.expected(range(len(expected)), rows, batches)
    of_host = [tile.index for mixture, own in chosen.items() for one in own for tile in held[mixture][one.expert]]
    return frozenset(of_host), {mixture: sum(one.host_s for one in own) for mixture, own in chosen.items()}
