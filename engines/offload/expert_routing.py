"""Which experts a pass needs: those that some batch routes tokens to. No other's tiles are read or multiplied.

With a device the host may multiply some of them instead, whose tiles are not read either.
"""

from collections.abc import Sequence

from engines.offload.memory.expert_split import ExpertSplit
from engines.offload.memory.expert_usage import ExpertUsage, MixtureCounts
from engines.offload.weights.kept_usage import KeptUsage
from engines.offload.weights.stream import WeightStream


class ExpertRouting:
    """The experts of one pass, whose tiles come from `stream` or are resident.

    The tiles of experts that no batch of the pass needs are neither read nor multiplied; `counts` counts the others. In
    a pass of more than `usual_rows` rows the stream reads ahead what by `usage` is likely only then. `split`: which
    ones the host multiplies beside a device.
    """

    def __init__(
        self, usage: ExpertUsage, usual_rows: int, stream: WeightStream, counts: KeptUsage,
        split: ExpertSplit | None = None,
    ) -> None:  # fmt: skip
        self._usage = usage
        self._usual_rows = usual_rows
        self._stream = stream
        self._kept = counts
        self._experts = usage.experts
        self._split = split
        self._streamed: dict[str, list[tuple[int, int]]] = {}  # by mixture: tile, expert
        for tile in stream.tiles:
            if tile.matrix in self._experts:
                mixture, expert = self._experts[tile.matrix]
                self._streamed.setdefault(mixture, []).append((tile.index, expert))
        self._counts: dict[str, MixtureCounts] = {}  # of mixtures that a batch of this pass has routed
        self._asked: dict[str, list[int]] = {}  # rows by expert, without those that the host multiplies
        self._decided: set[str] = set()  # mixtures that all batches of this pass have routed

    def begin_pass(self, rows: int, batches: int) -> None:
        """Forgets the routes of the last pass; this one has `rows` rows in so many batches."""
        self._counts.clear()
        self._asked.clear()
        self._decided.clear()
        if self._split is not None:
            self._split.begin_pass()
        if self._experts and rows > self._usual_rows:
            likely = self._usage.likely(self._stream.tiles, rows)
            needed = likely if self._split is None else self._split.to_copy(likely, rows, batches)
            self._stream.decide(unneeded=(), needed=needed)

    def end_pass(self) -> None:
        """Counts the experts of a pass that has ended well."""
        for mixture, counts in self._counts.items():
            if counts.tokens:
                self._kept.add(mixture, counts)

    def route(self, mixture: str, rows: Sequence[int], tokens: int) -> tuple[list[int], list[int]]:
        """A batch sends rows[e] of its `tokens` rows to expert e. Returns the experts whose products it asks for, and
        those that the host multiplies for it."""
        asked = self._asked.setdefault(mixture, [0] * len(rows))
        on_host = [] if self._split is None else self._split.choose(mixture, rows, asked, self._stream.has_begun)
        here = [expert for expert, count in enumerate(rows) if count and expert not in on_host]
        for expert in here:
            asked[expert] += rows[expert]
        known = self._counts.get(mixture)
        tokens, rows = (tokens, rows) if known is None else (
            known.tokens + tokens, [a + b for a, b in zip(known.rows, rows, strict=True)]
        )  # fmt: skip
        self._counts[mixture] = MixtureCounts.of_pass(tokens, rows)
        return here, on_host

    def is_expert(self, matrix: str) -> bool:
        """Whether a matrix is one expert's, which not every batch multiplies."""
        return matrix in self._experts

    def needs(self, matrix: str) -> bool:
        """Whether some batch asks for products with a matrix. When a mixture is due, all batches have routed it."""
        if matrix not in self._experts:
            return True
        mixture, expert = self._experts[matrix]
        rows = self._asked[mixture]
        if mixture not in self._decided:
            self._decided.add(mixture)
            streamed = self._streamed.get(mixture, ())
            self._stream.decide(
                unneeded=[tile for tile, of in streamed if not rows[of]],
                needed=[tile for tile, of in streamed if rows[of]],
            )
        return rows[expert] > 0
