"""`harness run`: a suite's cells, measured or predicted. Imports are made inside functions, as in cli.py."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_FAILED, EXIT_HARDWARE, EXIT_INTERRUPTED, interrupt, one_line_errors, say

if TYPE_CHECKING:
    from harness.api import RunSpec, SuiteSpec


@click.command()
@click.argument("suite")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory [default: results/<suite name>].")
@click.option("--engine", "engines", multiple=True, metavar="E", help="Only cells of this engine; may be repeated.")
@click.option("--cell", "names", multiple=True, metavar="NAME", help="Only this cell; may be repeated.")
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override in every cell: policy.schedule=row.")
@click.option("--shard", metavar="I/N", help="Run the I-th of N disjoint parts of the suite (1-based).")
@click.option("--launcher", metavar="L", help="process, venv (the engine's environment), docker, or a plug-in's.")
@click.option("--fresh", is_flag=True, help="Start over: earlier records are set aside, not resumed.")
@click.option("--simulate", is_flag=True, help="Predict every cell for --hardware instead of running it.")
@click.option("--hardware", metavar="H", help="With --simulate: see harness plan [default: local].")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data of accuracy tasks [default: the hub].")
@click.option("--no-report", is_flag=True, help="Write records only; `harness report` makes the report of them later.")
@click.option("--dry-run", is_flag=True, help="Print the cells and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the cells as JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Models and remembered searches [$HARNESS_CACHE].")
def run(
    suite: str, out: Path | None, engines: tuple[str, ...], names: tuple[str, ...], overrides: tuple[str, ...],
    shard: str | None, launcher: str | None, fresh: bool, simulate: bool, hardware: str | None,
    data_dir: Path | None, no_report: bool, dry_run: bool, as_json: bool, cache_dir: Path | None,
) -> None:  # fmt: skip
    """Run SUITE (a file, or the name of a shipped suite) and write records and a report.

    An interrupted run goes on where it stopped when the same command is given again.

    \b
    Examples:
      harness run suites/quickstart.yaml
      harness run suites/cpu_offload.yaml --engine accelerate --set repeats=1 --out /tmp/try
      harness run suites/cpu_offload.yaml --shard 1/2
      harness run suites/quickstart.yaml --launcher docker
      harness run suites/opt175b_t4.yaml --simulate --hardware t4_gcp
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run; a run's data are in its records.jsonl")
    if hardware is not None and not simulate:
        raise click.UsageError("--hardware goes with --simulate; a run is of the machine it runs on")
    with one_line_errors():
        from harness.api import HarnessError
        from harness.suite.config import load_suite
        from harness.suite.shipped import find_suite

        path = find_suite(suite)
        overrides += (f"launcher={launcher}",) if launcher else ()
        loaded = load_suite(path, overrides)
        cells = _select(loaded, engines, names, shard)
        if dry_run:
            _print_cells(cells, as_json)
            return
        if not cells:
            say(f"shard {shard} holds no cells of {loaded.name}: nothing to do", err=True)
            return
        if simulate:
            sys.exit(_simulate(loaded, cells, path, overrides, out, cache_dir, hardware or "local"))
        if data_dir is not None and not data_dir.is_dir():
            raise HarnessError(f"--data-dir {data_dir}: no such folder")
        sys.exit(_run(loaded, cells, path, overrides, out, cache_dir, fresh, data_dir, not no_report))


def _run(
    suite: SuiteSpec, cells: list[RunSpec], path: Path, overrides: tuple[str, ...],
    out: Path | None, cache: Path | None, fresh: bool, data: Path | None, report: bool,
) -> int:  # fmt: skip
    from harness.common.files import default_cache
    from harness.hardware.requirements import check_requirements
    from harness.run import runner
    from harness.run.progress import make_progress
    from harness.run.store import RECORDS
    from reports.build import build

    out = out or Path("results") / suite.name
    cache = cache or default_cache()
    resuming = (out / RECORDS).exists()
    if lacking := check_requirements(suite, cache, resuming):
        say(f"harness: this machine does not meet {suite.name}: {'; '.join(lacking)}", err=True)
        say(f"shipped suites that would run here: {', '.join(_runnable(cache)) or 'none'}", err=True)
        return EXIT_HARDWARE
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means to go on
        signal.signal(signal.SIGHUP, interrupt)
    # Without the folders of this machine, so that records can be shared.
    command = shlex.join(["harness", "run", path.name if path.is_absolute() else str(path), *_as_options(overrides)])
    progress = make_progress()
    with progress if isinstance(progress, contextlib.AbstractContextManager) else contextlib.nullcontext():
        try:
            records = runner.Runner(suite, path, out, cache, progress, command, data).run(cells, fresh)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
    if stopped:
        again = "run the same command again without --fresh" if fresh else "run the same command again"
        say(f"interrupted; {again} to go on (records: {out / RECORDS})", err=True)
        return EXIT_INTERRUPTED
    written = build([out], cache=cache) if report else [out / RECORDS]
    with contextlib.suppress(BrokenPipeError):  # who reads only the first lines still gets the true exit code
        _print_summary(records)
    say(f"{'report' if report else 'records'}: {', '.join(str(p) for p in written)}", err=True)
    failed = runner.unexpected(records)
    for record in failed:
        say(f"failed: {record.spec.name} repeat {record.repeat + 1}: {record.status}: {record.reason}", err=True)
    return EXIT_FAILED if failed else 0


def _simulate(
    suite: SuiteSpec, cells: list[RunSpec], path: Path, overrides: tuple[str, ...],
    out: Path | None, cache: Path | None, hardware: str,
) -> int:  # fmt: skip
    from harness.cli.job_progress import make_job_progress
    from harness.common.files import default_cache
    from harness.run.simulation import simulate
    from reports.build import build

    out = out or Path("results") / f"{suite.name}-{Path(hardware).stem}-simulated"
    cache = cache or default_cache()
    command = ["harness", "run", path.name if path.is_absolute() else str(path), *_as_options(overrides)]
    command += ["--simulate", "--hardware", hardware]
    with make_job_progress() as progress:
        records = simulate(cells, path, out, hardware, cache, shlex.join(command),
                           lambda done, total: progress.advance("predicting cells", done, total))  # fmt: skip
    written = build([out], cache=cache)
    with contextlib.suppress(BrokenPipeError):
        _print_summary(records)
    say("report: " + ", ".join(str(p) for p in written), err=True)
    for record in records:
        if record.status not in ("ok", record.spec.expect):
            say(f"{record.status}: {record.spec.name}: {record.reason}", err=True)
    return 0


def _select(suite: SuiteSpec, engines: tuple[str, ...], names: tuple[str, ...], shard: str | None) -> list[RunSpec]:
    from harness.api import HarnessError
    from harness.run.steps import shard as part

    cells = list(suite.cells)
    for chosen, key in ((engines, "engine"), (names, "name")):
        present = {getattr(c, key) for c in suite.cells}
        if unknown := [c for c in chosen if c not in present]:
            known = ", ".join(sorted(present))
            what = {"engine": "engine", "name": "cell"}[key]
            raise HarnessError(f"suite {suite.name} has no {what} {unknown[0]!r} (it has {known})")
        cells = [c for c in cells if not chosen or getattr(c, key) in chosen]
    if shard is None:
        return cells
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise HarnessError(f"--shard {shard}: expected I/N with 1 <= I <= N, such as 1/4")
    return part(cells, int(index) - 1, int(count))


def _print_cells(cells: list[RunSpec], as_json: bool) -> None:
    from harness.api import to_json

    for cell in cells:
        if as_json:
            click.echo(json.dumps(to_json(cell) | {"fingerprint": cell.fingerprint()}))
        else:
            batch = f"batch {cell.policy.block_size}" if cell.tune == "none" else cell.tune.replace("_", " ")
            notes = [
                n for n, on in ((f"expect {cell.expect}", cell.expect != "ok"), ("reference", cell.reference)) if on
            ]
            known = [cell.fingerprint(), cell.name, cell.model.id, cell.workload.label, batch, f"x{cell.repeats}"]
            click.echo("  ".join([*known, *notes]))


def _runnable(cache: Path) -> list[str]:
    """Shipped suites whose requirements this machine meets."""
    from harness.hardware.requirements import check_requirements
    from harness.suite.shipped import shipped_suites

    return [suite.name for suite in shipped_suites() if not check_requirements(suite, cache)]


def _print_summary(records: list[Any]) -> None:
    """One screen on stdout: what a person wants to know first."""
    from reports.terminal import summary_text

    click.echo(summary_text(records))


def _as_options(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]
