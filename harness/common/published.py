"""Figures that papers published, as numbers, each file with its source in its first lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

#: A paper's table that a suite can say it reproduces.
PublishedTable = Literal["flexgen_throughput_t4", "lm_offload_a100"]
_FOLDER = Path(__file__).with_name("published_figures")


def published_rows(name: str) -> Iterator[dict[str, str]]:
    """Rows of a file by column; empty where the paper gives nothing."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))
