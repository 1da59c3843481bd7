"""Divides a mixture's experts between the host, which has their weights, and a device, to which they are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile

#: An expert of more rows is copied, whatever the rates say: so much does the host's work memory hold.
MOST_ROWS = 256


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
    """An expert that `rows` rows go to, whose weights have `nbytes` bytes."""

    expert: int
    rows: int
    nbytes: int


def for_host(
    offered: Sequence[RoutedExpert], rates: ExpertRates, link_s: float = 0.0, host_s: float = 0.0
) -> list[RoutedExpert]:
    """Those of the `offered` experts that the host multiplies, so that host and link are done soonest, where they have
    `link_s` and `host_s` of other work.

    A copy takes as long for one row as for many, so the host gets the experts of the fewest rows. Source: Fiddler
    (Kamahori et al. 2024), section 3.2, which compares the two times expert by expert; here the two run side by side.
    """
    few = [each for each in offered if each.rows <= MOST_ROWS]
    by_rows = sorted(few, key=lambda each: (each.rows, each.expert))
    copies = link_s + sum(rates.copy_s(each.nbytes) for each in offered)
    soonest, count = max(copies, host_s), 0
    for taken, each in enumerate(by_rows, 1):
        copies -= rates.copy_s(each.nbytes)
        host_s += rates.host_s(each.nbytes, each.rows)
        if (done := max(copies, host_s)) < soonest:
            soonest, count = done, taken
    return by_rows[:count]


def held_experts(
    tiles: Iterable[WeightTile], pinned: Collection[int], usage: ExpertUsage
) -> dict[str, dict[int, list[WeightTile]]]:
    """By mixture and expert, the tiles of those experts that host memory holds as a whole: all are `pinned`."""
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

    `held`: as of held_experts. `streamed`: all tiles that are copied to the device, among them those of experts that
    are on disk, or as a whole or in part nowhere else.
    """

    def __init__(
        self, held: dict[str, dict[int, list[WeightTile]]], streamed: Iterable[WeightTile], usage: ExpertUsage,
        rates: ExpertRates,
    ) -> None:  # fmt: skip
        self._held = held
        self._usage = usage
        self._rates = rates
        self._bytes: dict[tuple[str, int], int] = {}  # of each expert, that are copied
        others = 0
        for tile in streamed:
            if (of := usage.experts.get(tile.matrix)) is None:
                others += tile.nbytes
            else:
                self._bytes[of] = self._bytes.get(of, 0) + tile.nbytes
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
        held = self._held.get(mixture, {})
        offered, link_s = list[RoutedExpert](), self._between_s
        for expert, count in enumerate(rows):
            nbytes = self._bytes.get((mixture, expert), 0)  # none of one that is resident
            if not nbytes or not (count or asked[expert]):
                continue
            if expert not in held or asked[expert] or any(has_begun(tile.index) for tile in held[expert]):
                link_s += self._rates.copy_s(nbytes)
            else:
                offered.append(RoutedExpert(expert, count, nbytes))
        busy_s = self._busy_s.get(mixture, 0.0)
        chosen = for_host(offered, self._rates, link_s, busy_s)
        self._busy_s[mixture] = busy_s + sum(self._rates.host_s(each.nbytes, each.rows) for each in chosen)
        return [each.expert for each in chosen]

    def to_copy(self, likely: Sequence[int], rows: float) -> list[int]:
        """Of the tiles that a pass of `rows` rows is `likely` to need (indices), those of experts that it is not likely
        to have multiplied by the host: copying them before the router has chosen would leave the host nothing."""
        wanted, shares = set(likely), self._usage.row_shares()
        for mixture, experts in self._held.items():
            offered, link_s = list[RoutedExpert](), self._between_s
            for (of, expert), nbytes in self._bytes.items():
                if of != mixture:
                    continue
                own = experts.get(expert)
                if own is None:
                    link_s += self._rates.copy_s(nbytes)
                elif all(tile.index in wanted for tile in own):
                    offered.append(RoutedExpert(expert, max(1, round(rows * shares[own[0].matrix])), nbytes))
            for each in for_host(offered, self._rates, link_s):
                wanted.difference_update(tile.index for tile in experts[each.expert])
        return [i for i in likely if i in wanted]
