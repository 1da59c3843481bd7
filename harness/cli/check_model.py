"""`harness check-model`: the performance model against published figures."""

from __future__ import annotations

import json

import click

from harness.cli.options import json_option
from harness.cli.tables import print_rows


@click.command("check-model")
@json_option()
def check_model(as_json: bool) -> None:
    """Compare the performance model with published figures: those its constants were fitted on, and all others.

    \b
    Example:
      harness check-model
    """
    from harness.planning.check_model import errors_by_group, published_cells

    cells = published_cells()
    if as_json:
        click.echo(json.dumps(cells))
        return
    print_rows([{**cell, "error": _signed(cell["error"])} for cell in cells])
    click.echo()
    print_rows(
        [
            {
                "hardware": group.hardware,
                "engine": group.engine,
                "cells not fitted": len(group.unseen),
                "median error": _unsigned(group.median_unseen),
                "largest": _unsigned(max(group.unseen)),
                "cells fitted": len(group.fitted),
                "their median": _unsigned(group.median_fitted),
                "their largest": _unsigned(max(group.fitted, default=None)),
            }
            for group in errors_by_group(cells)
        ]
    )


def _unsigned(error: float | None) -> str:
    return "" if error is None else f"{error:.1%}"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}" if error else "0"
