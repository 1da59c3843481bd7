"""`harness check-model`: the performance model against published figures."""

import json
from statistics import median

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
                "hardware": hardware,
                "engine": engine,
                "cells not fitted": len(unseen),
                "median error": f"{median(unseen):.1%}",
                "largest": f"{max(unseen):.1%}",
                "cells fitted": len(fitted),
                "their median": f"{median(fitted):.1%}" if fitted else "",
                "their largest": f"{max(fitted):.1%}" if fitted else "",
            }
            for (hardware, engine), (unseen, fitted) in errors_by_group(cells).items()
        ]
    )


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}" if error else "0"
