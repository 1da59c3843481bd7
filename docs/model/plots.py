"""Draws the plots of docs/model.md: predictions beside published figures, and beside what was measured on one host.

`python docs/model/plots.py [RUN]...` writes published.svg and, where finished runs are named, measured.svg beside this
file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engines.planning import published
from harness import hardware
from reports.records import load_records

FOLDER = Path(__file__).parent
#: Colour-blind safe (Okabe and Ito 2008), with a shape each.
MARKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
#: Within so much of the figure: the band that is drawn.
BAND = 0.15


def main(runs: Sequence[Path]) -> None:
    """Draws what there are figures for."""
    mpl.rcParams["svg.hashsalt"] = "model"  # the same file for the same figures
    draw_published(FOLDER / "published.svg")
    if runs:
        draw_measured(runs, FOLDER / "measured.svg")


def draw_published(path: Path) -> None:
    """Published figures of each machine; hollow are those that constants were fitted on."""
    profiles = {name: hardware.load(name) for name in hardware.names()}
    outcomes = [o for o in published.evaluate(published.cells(), profiles) if o.cell.figure and not o.cell.repeated]
    machines = list(dict.fromkeys(o.cell.hardware for o in outcomes))
    figure = Figure(figsize=(5 * len(machines), 4.8), layout="constrained")
    for axes, machine in zip(figure.subplots(1, len(machines)), machines, strict=True):
        mine = [o for o in outcomes if o.cell.hardware == machine]
        for (colour, shape), engine in zip(MARKS, dict.fromkeys(o.cell.engine for o in mine), strict=False):
            for fitted in (False, True):
                some = [o for o in mine if o.cell.engine == engine and o.cell.fitted is fitted]
                axes.scatter([float(o.cell.figure or 0) for o in some], [o.predicted for o in some], marker=shape,
                             edgecolors=colour, facecolors="none" if fitted else colour, alpha=0.8,
                             label=f"{engine}, fitted" if fitted else engine)  # fmt: skip
        finish(axes, machine, "published token/s")
    save(figure, path)


def draw_measured(runs: Sequence[Path], path: Path) -> None:
    """Launches with a prediction, by schedule."""
    records = [r for r in load_records(runs) if r.status == "ok" and r.predicted]
    figure = Figure(figsize=(5, 4.8), layout="constrained")
    axes = figure.subplots()
    for (colour, shape), schedule in zip(MARKS, ("row", "zigzag", "sweep"), strict=False):
        some = [r for r in records if r.spec.policy.schedule == schedule]
        axes.scatter([r.metrics["generation_throughput_tok_s"] for r in some],
                     [r.predicted.throughput_tok_s for r in some if r.predicted], marker=shape, color=colour, alpha=0.8,
                     label=schedule)  # fmt: skip
    finish(axes, "this engine on one host", "measured token/s")
    save(figure, path)


def finish(axes: Axes, title: str, across: str) -> None:
    """Both axes alike, with the line of equality and the band around it."""
    axes.set(xscale="log", yscale="log", title=title, xlabel=across, ylabel="predicted token/s")
    low, high = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
    ends = [low, high]
    axes.plot(ends, ends, color="#666666", linewidth=0.8)
    axes.fill_between(ends, [e * (1 - BAND) for e in ends], [e * (1 + BAND) for e in ends], color="#999999", alpha=0.2,
                      linewidth=0, label=f"within {BAND:.0%}")  # fmt: skip
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.legend(fontsize="small")


def save(figure: Figure, path: Path) -> None:
    """As SVG on white, readable on any page; without the date."""
    figure.savefig(path, facecolor="white", metadata={"Date": None})
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
