"""How often the experts of a mixture are used, and with which probability a pass reads each weight tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.offload.memory.layout import Matrix, WeightTile
from harness.api import ModelShape


@dataclass(frozen=True)
class MixtureCounts:
    """What passes asked of one mixture: `tokens` rows in `passes` passes; by expert, the `rows` that went to it and how
    many passes `used` it."""

    tokens: int
    passes: int
    rows: tuple[int, ...]
    used: tuple[int, ...]

    @classmethod
    def of_pass(cls, tokens: int, rows: Sequence[int]) -> MixtureCounts:
        """The counts of one pass of so many `tokens`, of which rows[e] went to expert e."""
        return cls(tokens, 1, tuple(rows), tuple(int(count > 0) for count in rows))

    def __add__(self, other: MixtureCounts) -> MixtureCounts:
        rows = tuple(a + b for a, b in zip(self.rows, other.rows, strict=True))
        used = tuple(a + b for a, b in zip(self.used, other.used, strict=True))
        return MixtureCounts(self.tokens + other.tokens, self.passes + other.passes, rows, used)

    def row_share(self, expert: int, share: float) -> float:
        """The share of rows that go to an expert. A row by chance is counted beside the others: an expert that nobody
        has chosen yet may still be chosen."""
        return min(1.0, (self.rows[expert] + share) / (self.tokens + 1))

    def read_probability(self, expert: int, rows: float, share: float) -> float:
        """With which probability a pass of `rows` rows uses an expert, to which a `share` of the rows goes by chance.

        Rows are taken to choose independently, which overstates it where those of a pass are alike. So a pass is taken
        to use an expert no more often than the counted passes did, if those had as many rows.
        """
        independent = 1 - math.pow(1 - self.row_share(expert, share), rows)
        if self.passes and rows <= self.tokens / self.passes:
            return min(independent, (self.used[expert] + 1) / (self.passes + 1))
        return independent


@dataclass(frozen=True)
class ExpertUsage:
    """How often experts are used: measured, or uniform where nothing is counted.

    experts: of each expert's matrix, by name, its mixture and its index.
    share: of a mixture's experts, the part that a row goes to.
    counts: by mixture.
    """

    experts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    share: float = 1.0
    counts: Mapping[str, MixtureCounts] = field(default_factory=dict)

    @classmethod
    def of(
        cls, matrices: Sequence[Matrix], shape: ModelShape, counts: Mapping[str, MixtureCounts] | None = None
    ) -> ExpertUsage:
        """The usage of a model's `matrices`, with its `counts` if there are any."""
        experts = {m.name: (m.mixture, m.expert) for m in matrices if m.expert is not None}
        share = shape.forward_params / shape.forward_stored if experts else 1.0
        return cls(experts, share, counts or {})

    def read_probabilities(self, tiles: Sequence[WeightTile], rows: float) -> list[float]:
        """Of each tile, the probability that a pass of `rows` rows needs it: 1 but for experts."""
        by_matrix = {
            matrix: self._read_probability(mixture, expert, rows) for matrix, (mixture, expert) in self.experts.items()
        }
        return [by_matrix.get(tile.matrix, 1.0) for tile in tiles]

    def row_shares(self) -> dict[str, float]:
        """By the name of an expert's matrix, the share of a pass's rows that go to it."""
        shares = {}
        for matrix, (mixture, expert) in self.experts.items():
            counted = self.counts.get(mixture)
            shares[matrix] = self.share if counted is None else counted.row_share(expert, self.share)
        return shares

    def likely(self, tiles: Sequence[WeightTile], rows: float) -> list[int]:
        """Indices of those `tiles` that a pass of `rows` rows needs more often than not, so that reading them before
        the router has chosen wins more than it wastes."""
        probabilities = self.read_probabilities(tiles, rows)
        return [tile.index for tile, p in zip(tiles, probabilities, strict=True) if p >= 0.5]

    def expected_bytes(self, tiles: Sequence[WeightTile], rows: float) -> float:
        """Bytes of those `tiles` that a pass of `rows` rows is expected to need."""
        probabilities = self.read_probabilities(tiles, rows)
        return sum(tile.nbytes * p for tile, p in zip(tiles, probabilities, strict=True))

    def read_share(self, tiles: Sequence[WeightTile], rows: float) -> float:
        """The part of the experts' bytes that a pass of `rows` rows is expected to need."""
        experts = [tile for tile in tiles if tile.matrix in self.experts]
        return self.expected_bytes(experts, rows) / sum(tile.nbytes for tile in experts)

    def _read_probability(self, mixture: str, expert: int, rows: float) -> float:
        counted = self.counts.get(mixture)
        if counted is None:
            return 1 - math.pow(1 - self.share, rows)
        return counted.read_probability(expert, rows, self.share)
