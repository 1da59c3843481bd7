"""The options of `harness run`, and the cells that they select."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError, RunSpec, SuiteSpec
from harness.suite.config import load_suite
from harness.suite.shipped import find_suite


@dataclass(frozen=True)
class RunOptions:
    """What a user gave: a suite, which of its cells and under which overrides, and how to run them.

    `engines`, `names` and `shard` (`I/N`, 1-based) select cells, all of them if empty. `out` is the run directory, None
    for results/<suite name>. `hardware` is the profile of a simulated run, None for the local one.
    """

    suite: str
    out: Path | None
    engines: tuple[str, ...]
    names: tuple[str, ...]
    overrides: tuple[str, ...]
    shard: str | None
    launcher: str | None
    fresh: bool
    simulate: bool
    hardware: str | None
    data_dir: Path | None
    no_report: bool
    extra_tries: int
    cache: Path


@dataclass(frozen=True)
class Selection:
    """A suite with its file, the cells of it to run, and the command that selects them, for records."""

    suite: SuiteSpec
    path: Path
    cells: list[RunSpec]
    command: str


def select(options: RunOptions) -> Selection:
    """Loads the suite and selects cells. Raises HarnessError for a broken suite, an unknown name or a bad shard."""
    path = find_suite(options.suite)
    overrides = options.overrides + ((f"launcher={options.launcher}",) if options.launcher else ())
    suite = load_suite(path, overrides)
    # without folders of this machine, so that records can be shared
    command = ["harness", "run", path.name if path.is_absolute() else str(path)]
    for override in overrides:
        command += ["--set", override]
    return Selection(suite, path, _shard(_named(suite, options), options.shard), shlex.join(command))


def _named(suite: SuiteSpec, options: RunOptions) -> list[RunSpec]:
    """The cells of the chosen engines and names."""
    cells = list(suite.cells)
    for chosen, field, noun in ((options.engines, "engine", "engine"), (options.names, "name", "cell")):
        known = {getattr(c, field) for c in suite.cells}
        if unknown := [name for name in chosen if name not in known]:
            raise HarnessError(f"suite {suite.name} has no {noun} {unknown[0]!r} (it has {', '.join(sorted(known))})")
        cells = [c for c in cells if not chosen or getattr(c, field) in chosen]
    return cells


def _shard(cells: list[RunSpec], shard: str | None) -> list[RunSpec]:
    """Shard I of N disjoint ones: every N-th cell, from the I-th."""
    if shard is None:
        return cells
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise HarnessError(f"--shard {shard}: expected I/N with 1 <= I <= N, such as 1/4")
    return cells[int(index) - 1 :: int(count)]
