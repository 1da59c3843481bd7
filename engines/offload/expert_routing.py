"""Which experts a pass needs: those that some batch routes tokens to. No other's tiles are read or multiplied."""

from collections.abc import Sequence

from engines.offload.memory.expert_usage import ExpertUsage, MixtureCounts
from engines.offload.weights.kept_usage import KeptUsage
from engines.offload.weights.stream import WeightStream


class ExpertRouting:
    """The experts of one pass, whose tiles come from `stream` or are resident.

    The tiles of experts that no batch of the pass needs are neither read nor multiplied; `counts` counts the others. In
    a pass of more than `usual_rows` rows the stream reads ahead what by `usage` is likely only then.
    """

    def __init__(self, usage: ExpertUsage, usual_rows: int, stream: WeightStream, counts: KeptUsage) -> None:
        self._usage = usage
        self._usual_rows = usual_rows
        self._stream = stream
        self._kept = counts
        self._experts = usage.experts
        self._streamed: dict[str, list[tuple[int, int]]] = {}  # by mixture: tile, expert
        for tile in stream.tiles:
            if tile.matrix in self._experts:
                mixture, expert = self._experts[tile.matrix]
                self._streamed.setdefault(mixture, []).append((tile.index, expert))
        self._counts: dict[str, MixtureCounts] = {}  # of mixtures that a batch of this pass has routed
        self._decided: set[str] = set()  # mixtures that all batches of this pass have routed

    def begin_pass(self, rows: int) -> None:
        """Forgets the routes of the last pass; this one has `rows` rows."""
        self._counts.clear()
        self._decided.clear()
        if self._experts and rows > self._usual_rows:
            self._stream.decide(unneeded=(), needed=self._usage.likely(self._stream.tiles, rows))

    def end_pass(self) -> None:
        """Counts the experts of a pass that has ended well."""
        for mixture, counts in self._counts.items():
            if counts.tokens:
                self._kept.add(mixture, counts)

    def route(self, mixture: str, rows: Sequence[int], tokens: int) -> None:
        """A batch sends rows[e] of its `tokens` rows to expert e."""
        known = self._counts.get(mixture)
        tokens, rows = (tokens, rows) if known is None else (
            known.tokens + tokens, [a + b for a, b in zip(known.rows, rows, strict=True)]
        )  # fmt: skip
        self._counts[mixture] = MixtureCounts.of_pass(tokens, rows)

    def is_expert(self, matrix: str) -> bool:
        """Whether a matrix is one expert's, which not every batch multiplies."""
        return matrix in self._experts

    def needs(self, matrix: str) -> bool:
        """Whether some batch asks for a matrix. When the first of a mixture is due, all batches have routed it."""
        if matrix not in self._experts:
            return True
        mixture, expert = self._experts[matrix]
        rows = self._counts[mixture].rows
        if mixture not in self._decided:
            self._decided.add(mixture)
            streamed = self._streamed.get(mixture, ())
            self._stream.decide(
                unneeded=[tile for tile, of in streamed if not rows[of]],
                needed=[tile for tile, of in streamed if rows[of]],
            )
        return rows[expert] > 0
