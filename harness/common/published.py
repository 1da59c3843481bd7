"""Figures published in papers, as CSV files whose first lines give the source."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

#: The published tables that a suite can declare to reproduce.
PublishedTable = Literal["flexgen_throughput_t4", "lm_offload_a100", "moe_lightning_t4"]
_FOLDER = Path(__file__).with_name("published_figures")


def published_rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table by column; a cell is empty if the paper gives no figure."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))
