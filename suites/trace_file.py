"""Reads traces of requests: CSV with the columns ContextTokens and GeneratedTokens, and for arrivals TIMESTAMP.

The columns are those of Azure's traces (Patel et al. 2024).
"""

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.api import HarnessError
from harness.common.regular_file import read_regular


@dataclass(frozen=True)
class TraceLine:
    """Tokens of a prompt and of its answer, the text of the time, and `where`: file and line for messages."""

    prompt: int
    generated: int
    timestamp: str
    where: str


def read_trace(trace: str, count: int | None = None) -> list[TraceLine]:
    """The first `count` lines, or all. Raises HarnessError for a file that is no trace, with the line that is wrong."""
    try:
        text = read_regular(Path(trace)).decode("utf-8-sig")
        lines = list(itertools.islice(_lines(trace, io.StringIO(text, newline="")), count))
    except csv.Error as exc:
        raise HarnessError(f"trace {trace} is not CSV: {exc}") from None
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise HarnessError(f"trace {trace} cannot be read: {reason}; give a CSV file") from None
    if not lines:
        raise HarnessError(f"trace {trace} has no lines below its header")
    return lines


def arrival_times(lines: list[TraceLine]) -> list[float]:
    """Seconds of each line's TIMESTAMP since the first. Raises HarnessError where one is no time or runs backwards."""
    times: list[float] = []
    first = None
    for line in lines:
        try:
            when = datetime.fromisoformat(line.timestamp)
            first = first or when
            seconds = (when - first).total_seconds()
        except (ValueError, TypeError):
            raise HarnessError(
                f"{line.where}: TIMESTAMP is no time such as 2023-11-16 18:17:03.97; use another process"
            ) from None
        if times and seconds < times[-1]:
            raise HarnessError(f"{line.where}: TIMESTAMP is earlier than the line before; sort the file by time")
        times.append(seconds)
    return times


def _lines(trace: str, file: Iterator[str]) -> Iterator[TraceLine]:
    for row in (reader := csv.DictReader(file)):
        where = f"{trace}:{reader.line_num}"
        try:
            prompt, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError):
            raise HarnessError(f"{where}: expected integers in ContextTokens and GeneratedTokens") from None
        if min(prompt, generated) < 0:
            raise HarnessError(f"{where}: a number of tokens is negative")
        yield TraceLine(prompt, generated, row.get("TIMESTAMP") or "", where)
