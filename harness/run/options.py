"""The options of `harness run`, and the cells that they select."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import registry
from harness.api import HarnessError, RunSpec, SuiteSpec, UnsupportedError
from harness.suite.config import load_suite, without_secret
from harness.suite.shipped import find_suite


@dataclass(frozen=True)
class RunOptions:
    """What a user gave: a suite, which of its cells and under which overrides, and how to run them.

    `engines`, `names` and `shard` (`I/N`, 1-based) select cells, all of them if empty. `out` is the run directory, None
    for results/<suite name>. `hardware` is the profile of a simulated run, None for the local one. `ray` is the address
    of a cluster whose nodes measure, `slurm` describes the jobs of one.
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
    ray: str | None = None
    slurm: str | None = None

    @property
    def on_cluster(self) -> bool:
        """Whether other machines measure."""
        return self.ray is not None or self.slurm is not None


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
        command += ["--set", without_secret(override)]
    cells = _shard(_named(suite, options), options.shard)
    for override in options.overrides:
        _require_effect(override, cells)
    return Selection(suite, path, cells, shlex.join(command))


def _require_effect(override: str, cells: Sequence[RunSpec]) -> None:
    """Raises HarnessError where all `cells` would end in a refusal of what `override` sets: none of them reads it."""
    key = override.partition("=")[0]
    setting = f"policy.{key}" if key in ("schedule", "compute_dtype") else key
    reasons = [_refusal(cell) for cell in cells if cell.expect != "unsupported"]
    if reasons and all(setting in re.findall(r"[\w.]+", reason) for reason in reasons):
        raise HarnessError(f"--set {without_secret(override)}: no chosen cell can run with it: {reasons[0]}")


def _refusal(cell: RunSpec) -> str:
    """Why a cell's engine cannot run its settings, as far as that is known; empty otherwise."""
    try:
        registry.refuse(cell)
    except UnsupportedError as exc:
        return str(exc)
    return ""


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
    numbers = slash and all(part.isdecimal() and len(part) < 10 for part in (index, count))
    if not (numbers and 1 <= int(index) <= int(count)):
        raise HarnessError(f"--shard {shard}: expected I/N with 1 <= I <= N, such as 1/4")
    return cells[int(index) - 1 :: int(count)]
