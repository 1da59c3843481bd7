"""Rows of plain data as pandas data frames, and tables as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.api import HarnessError
from harness.common.packages import install_extra

if TYPE_CHECKING:
    import pandas as pd

    from reports.tables import Table


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> pd.DataFrame:
    """A frame with a row for each of `rows`; None becomes a missing value. Raises HarnessError without pandas.

    `columns` name those of a frame without rows.
    """
    try:
        import pandas as pd
    except ImportError:
        raise HarnessError(f"frames need pandas: {install_extra('frames')}") from None
    return pd.DataFrame(list(rows), columns=list(rows[0] if rows else columns))


def html_of(parts: Iterable[str | Table]) -> str:
    """Lines and tables as HTML that shows every value literally."""
    from reports import render

    return render.html_of("fragment.html", parts=list(parts))
