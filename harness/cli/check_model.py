"""`harness check-model`: the performance model against published figures."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import click

from harness.cli.errors import say, say_json
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
    from harness import hardware, registry

    profiles = {name: hardware.load(name) for name in hardware.names()}
    cells = registry.published_figures().table(profiles)
    if as_json:
        say_json(cells)
        return
    print_rows([{**cell, **{name: _signed(cell[name]) for name in ("error", "closed form")}} for cell in cells])
    say("\nAblations: throughput over that of the run with which the paper compares it:")
    print_rows([{**row, "error": _signed(row["error"])} for row in registry.ablations().rows(profiles)])
    say("\nErrors on whole tables that no constant was fitted on (leave one table out):")
    held_out = registry.model_fits().held_out(profiles)
    print_rows([{key: f"{v:.1%}" if isinstance(v, float) else v for key, v in row.items()} for row in held_out])
    say("\nErrors of the shipped constants:")
    print_rows(
        [
            {
                "hardware": machine,
                "engine": engine,
                "cells not fitted": len(unseen),
                "median error": f"{median(unseen):.1%}",
                "largest": f"{max(unseen):.1%}",
                "cells fitted": len(fitted),
                "their median": f"{median(fitted):.1%}" if fitted else "",
                "their largest": f"{max(fitted):.1%}" if fitted else "",
            }
            for (machine, engine), (unseen, fitted) in _errors(cells).items()
        ]
    )


def _errors(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Absolute errors by hardware and engine: of cells that no constant was fitted on, and of those that one was.

    Repeated cells, and those without a prediction, do not count.
    """
    groups: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for cell in cells:
        unseen, fitted = groups.setdefault((cell["hardware"], cell["engine"]), ([], []))
        if cell["error"] is not None and not cell["repeated"]:
            (fitted if cell["fitted"] else unseen).append(abs(cell["error"]))
    return groups


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}" if error else "0"
