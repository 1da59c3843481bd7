"""How long a pass takes by its number of rows, from the passes that were run; and the prefill budget it allows."""

from dataclasses import dataclass, field

#: The weight of the latest pass among those of similar size.
_LATEST = 0.2
#: Prompt tokens of a pass that is too long without them: prompts must go on, and not row by row.
_LEAST = 8


class PassModel:
    """Seconds of a pass as a line through measured points: one for each power of two of rows, an exponentially
    weighted mean of the passes in between."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # rows and seconds, by bit length of the rows

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over `rows` tokens took so long."""
        mean_rows, mean_s = self._means.get(rows.bit_length(), (rows, seconds))
        self._means[rows.bit_length()] = (
            mean_rows + _LATEST * (rows - mean_rows),
            mean_s + _LATEST * (seconds - mean_s),
        )

    def row_s(self) -> float | None:
        """Seconds of a pass by its rows, in the largest that were measured; None as long as nothing was."""
        if not self._means:
            return None
        rows, seconds = self._means[max(self._means)]
        return seconds / rows

    def rows_within(self, seconds: float) -> int | None:
        """The most rows of a pass that takes at most `seconds`; None as long as nothing was measured.

        Beyond the largest pass that was measured time grows in proportion to rows, which is never too short.
        """
        if not self._means:
            return None
        rows = longest = 0.0
        for next_rows, next_s in (self._means[key] for key in sorted(self._means)):
            if next_s > seconds:
                return int(rows + (next_rows - rows) * (seconds - longest) / (next_s - longest))
            rows, longest = next_rows, max(longest, next_s)
        return int(rows * seconds / longest)


@dataclass(frozen=True)
class LatencyBudget:
    """How many prompt tokens go into a pass of which the next token of running sequences waits no more than `target_s`,
    by the passes measured so far. `most`: the tokens that memory allows.

    A pass that nobody waits in, and the first one, take `most`.
    """

    target_s: float
    most: int
    passes: PassModel = field(compare=False)

    def __call__(self, decoding: int) -> int:
        """Prompt tokens of a pass with `decoding` decode rows."""
        rows = self.passes.rows_within(self.target_s) if decoding else None
        return self.most if rows is None else max(min(_LEAST, self.most), min(self.most, rows - decoding))
