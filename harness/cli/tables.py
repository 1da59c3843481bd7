"""Prints rows of plain data: aligned columns on a terminal, or JSON."""

from collections.abc import Sequence
from typing import Any

from harness.cli.errors import say, say_json

Row = dict[str, Any]


def print_rows(rows: Sequence[Row], as_json: bool = False) -> None:
    """Prints rows that have the same keys as aligned columns, or all as one JSON list."""
    if as_json:
        say_json(list(rows))
        return
    if not rows:
        return
    cells = [["" if v is None else " ".join(str(v).split()) for v in row.values()] for row in rows]
    header = [k.replace("_", " ") for k in rows[0]]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    for line in [header, *cells]:
        say("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
