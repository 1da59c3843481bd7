"""Divides a mixture's experts between the host, which has their weights, and a device, to which they are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile

#: An expert of more rows is copied, whatever the rates say: so much does the host's work memory hold.
MOST_ROWS = 256
#: By mixture and expert, the tiles of those that host memory holds as a whole.
HeldExperts = Mapping[str, Mapping[int, Sequence[WeightTile]]]


@dataclass(frozen=True)
class ExpertRates:
    """What an expert takes, by the bytes of its weights.

    link: bytes/s that are copied to the device.
    host: (rows, seconds per byte) that the host needs for products of so many rows, rows ascending.
    """

    link: float
    host: Sequence[tuple[int, float]]

    def copy_s(self, nbytes: int) -> float:
        """Seconds of an expert's copy to the device."""
        return nbytes / self.link

    def host_s(self, nbytes: int, rows: int) -> float:
        """Seconds of an expert's products of so many rows on the host: between the measured ones by interpolation, and
        beyond the last in proportion to the rows."""
        first, last = self.host[0], self.host[-1]
        if rows <= first[0]:
            return nbytes * first[1]
        if rows >= last[0]:
            return nbytes * last[1] * rows / last[0]
        (fewer, low), (more, high) = next(pair for pair in pairwise(self.host) if pair[1][0] >= rows)
        return nbytes * (low + (high - low) * (rows - fewer) / (more - fewer))


@dataclass(frozen=True)
class RoutedExpert:
    """An expert that `rows` rows of a batch go to: seconds of its copy to the device, and of its products on the
    host."""

    expert: int
    rows: int
    copy_s: float
    host_s: float


def for_host(offered: Sequence[RoutedExpert], link_s: float = 0.0, host_s: float = 0.0) -> list[RoutedExpert]:
    """Those of the `offered` experts that the host multiplies, so that host and link are done soonest, where they have
    `link_s` and `host_s` of other work.

    A copy takes as long for one row as for many, so the host gets the experts of the fewest rows. Source: Fiddler
    (Kamahori et al. 2024), section 3.2, which compares the two times expert by expert; here the two run side by side.
    """
    few = [each for each in offered if each.rows <= MOST_ROWS]
    by_rows = sorted(few, key=lambda each: (each.rows, each.expert))
    copies = link_s + sum(each.copy_s for each in offered)
    soonest, count = max(copies, host_s), 0
    for taken, each in enumerate(by_rows, 1):
        copies -= each.copy_s
        host_s += each.host_s
        if (done := max(copies, host_s)) < soonest:
            soonest, count = done, taken
    return by_rows[:count]


def held_experts(tiles: Iterable[WeightTile], pinned: Collection[int], usage: ExpertUsage) -> HeldExperts:
    """The experts whose tiles are all `pinned` in host memory."""
    experts: dict[str, dict[int, list[WeightTile]]] = {}
    for tile in tiles:
        if tile.matrix in usage.experts:
            mixture, expert = usage.experts[tile.matrix]
            experts.setdefault(mixture, {}).setdefault(expert, []).append(tile)
    return {
        mixture: {e: own for e, own in of_mixture.items() if all(tile.index in pinned for tile in own)}
        for mixture, of_mixture in experts.items()
    }


class ExpertSplit:
    """Which experts the host multiplies, pass by pass, by `rates`.

    `held`: the experts that it may multiply. `streamed`: all tiles that do not stay on the device, also those of dense
    matrices and of experts on disk, which the link has to carry besides.
    """

    def __init__(
        self, held: HeldExperts, streamed: Iterable[WeightTile], usage: ExpertUsage, rates: ExpertRates,
    ) -> None:  # fmt: skip
        self._held = held
        self._usage = usage
        self._rates = rates
        self._bytes_of: dict[str, dict[int, int]] = {}  # that are copied, by mixture and expert
        others = 0
        for tile in streamed:
            if (of := usage.experts.get(tile.matrix)) is None:
                others += tile.nbytes
            else:
                mixture, expert = of
                experts = self._bytes_of.setdefault(mixture, {})
                experts[expert] = experts.get(expert, 0) + tile.nbytes
        #: Seconds of copies from one mixture to the next beside experts.
        self._between_s = rates.copy_s(others) / max(1, len(held))
        self._busy_s: dict[str, float] = {}  # of a mixture's experts on the host in this pass

    def begin_pass(self) -> None:
        """Forgets what the host has to do."""
        self._busy_s.clear()

    def choose(
        self, mixture: str, rows: Sequence[int], asked: Sequence[int], has_begun: Callable[[int], bool]
    ) -> list[int]:
        """The experts that the host multiplies for a batch of which rows[e] rows go to expert e: none that another
        batch has `asked` the device for, or a tile of which (by index) `has_begun` to be copied."""
        held, nbytes_of = self._held.get(mixture, {}), self._bytes_of.get(mixture, {})
        offered, link_s = list[RoutedExpert](), self._between_s
        for expert, count in enumerate(rows):
            nbytes = nbytes_of.get(expert, 0)  # none of one that is resident
            if not nbytes or not (count or asked[expert]):
                continue
            if expert not in held or asked[expert] or any(has_begun(tile.index) for tile in held[expert]):
                link_s += self._rates.copy_s(nbytes)
            else:
                offered.append(self._routed(expert, count, nbytes))
        busy_s = self._busy_s.get(mixture, 0.0)
        chosen = for_host(offered, link_s, busy_s)
        self._busy_s[mixture] = busy_s + sum(each.host_s for each in chosen)
        return [each.expert for each in chosen]

    def _routed(self, expert: int, rows: int, nbytes: int, batches: int = 1) -> RoutedExpert:
        host_s = batches * self._rates.host_s(nbytes, rows)
        return RoutedExpert(expert, rows, self._rates.copy_s(nbytes), host_s)

    def expected(self, likely: Collection[int], rows: float, batches: int = 1) -> dict[str, list[RoutedExpert]]:
        """By mixture, the experts that the host is likely to multiply, in a pass of `rows` rows in so many batches, of
        those whose tiles are `likely` needed (indices)."""
        wanted, shares = set(likely), self._usage.row_shares()
        found = {}
        for mixture, experts in self._held.items():
            offered, link_s = list[RoutedExpert](), self._between_s
            for expert, nbytes in self._bytes_of.get(mixture, {}).items():
                own = experts.get(expert)
                if own is None:
                    link_s += self._rates.copy_s(nbytes)
                elif all(tile.index in wanted for tile in own):
                    share = max(1, round(rows / batches * shares[own[0].matrix]))
                    offered.append(self._routed(expert, share, nbytes, batches))
            found[mixture] = for_host(offered, link_s)
        return found

    def to_copy(self, likely: Sequence[int], rows: float, batches: int = 1) -> list[int]:
        """The `likely` tiles without those of experts that the host is likely to multiply: copying them before the
        router has chosen would leave it nothing."""
        here = {
            tile.index
            for mixture, experts in self.expected(likely, rows, batches).items()
            for each in experts
            for tile in self._held[mixture][each.expert]
        }
        return [i for i in likely if i not in here]
