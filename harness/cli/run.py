"""`harness run`: a suite's cells, measured or predicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_FAILED, EXIT_HARDWARE, say, say_json
from harness.cli.options import cache_option, cluster_options, json_option

if TYPE_CHECKING:
    from harness.api import RunRecord, RunSpec
    from harness.run.measure import Measured
    from harness.run.options import RunOptions, Selection


@click.command()
@click.argument("suite")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory [default: results/<suite name>].")
@click.option("--engine", "engines", multiple=True, metavar="E", help="Only cells of this engine; may be repeated.")
@click.option("--cell", "names", multiple=True, metavar="NAME", help="Only this cell; may be repeated.")
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override in every cell: policy.schedule=row.")
@click.option("--shard", metavar="I/N", help="Run the I-th of N disjoint parts of the suite (1-based).")
@click.option("--launcher", metavar="L",
              help="Run each cell in a process, in the engine's own environment (venv), in docker, or by a plug-in.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start over: set the cells' earlier records aside, instead of resuming.")
@click.option("--simulate", is_flag=True, help="Predict every cell for --hardware instead of running it.")
@click.option("--hardware", metavar="H", help="With --simulate: see harness plan [default: local].")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data of accuracy tasks [default: the hub].")
@click.option("--no-report", is_flag=True, help="Write records only; `harness report` makes the report later.")
@click.option("--extra-tries", type=click.IntRange(min=0), default=2, show_default=True,
              help="How often to repeat a launch that other processes disturbed, whatever its speed.")  # fmt: skip
@cluster_options("Measure on the nodes of")
@click.option("--dry-run", is_flag=True, help="Print the cells and stop.")
@json_option("With --dry-run: print the cells as JSON.")
@cache_option("Models and remembered searches")
def run(dry_run: bool, as_json: bool, **given: Any) -> None:
    """Run SUITE (a file, or the name of a shipped suite) and write records and a report.

    To resume an interrupted run, give the same command again.

    \b
    Examples:
      harness run suites/quickstart.yaml
      harness run suites/cpu_offload.yaml --engine accelerate --set repeats=1 --out /tmp/try
      harness run suites/cpu_offload.yaml --shard 1/2
      harness run suites/quickstart.yaml --launcher docker
      harness run suites/cpu_offload.yaml --ray auto
      harness run suites/opt175b_t4.yaml --simulate --hardware t4_gcp
    """
    from harness.run.options import RunOptions, select

    options = RunOptions(**given)
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run; a run's data are in its records.jsonl")
    if options.hardware is not None and not options.simulate:
        raise click.UsageError("--hardware goes with --simulate; a run measures the machine it runs on")
    if options.on_cluster and options.simulate:
        raise click.UsageError("--ray and --slurm measure; --simulate predicts here")
    if options.ray is not None and options.slurm is not None:
        raise click.UsageError("give --ray or --slurm, not both")
    selection = select(options)
    if dry_run:
        _print_cells(selection.cells, as_json)
    elif not selection.cells:
        say(f"shard {options.shard} holds no cells of {selection.suite.name}: nothing to do", err=True)
    elif options.simulate:
        _simulate(options, selection)
    else:
        sys.exit(_measure(options, selection))


def _measure(options: RunOptions, selection: Selection) -> int:
    """Runs the cells and writes the report; returns the exit code."""
    from harness.run.measure import UnmetRequirements, run_folder
    from harness.run.store import RECORDS
    from reports.build import build

    try:
        done = _measured(options, selection)
    except UnmetRequirements as exc:
        say(f"harness: {exc}", err=True)
        if not options.on_cluster:
            say(f"shipped suites that would run here: {', '.join(_runnable(options.cache)) or 'none'}", err=True)
        return EXIT_HARDWARE
    except KeyboardInterrupt:
        again = f"run the same command again{' without --fresh' if options.fresh else ''}"
        say(f"interrupted; {again} to resume (records: {run_folder(options, selection) / RECORDS})", err=True)
        raise
    written = [done.out / RECORDS] if options.no_report else build([done.out], cache=options.cache)
    _print_summary(done.records)
    say(f"{'records' if options.no_report else 'report'}: {', '.join(map(str, written))}", err=True)
    for record in done.failed:
        say(f"failed: {record.spec.name} repeat {record.repeat + 1}: {record.status}: {record.reason}", err=True)
    return EXIT_FAILED if done.failed else 0


def _measured(options: RunOptions, selection: Selection) -> Measured:
    """The launches, done here or on the nodes of a cluster."""
    from harness.run.measure import measure
    from harness.run.progress import make_progress

    progress = make_progress()
    if not options.on_cluster:
        return measure(options, selection, progress)
    from harness.cluster.slurm import cluster_at
    from harness.cluster.suite import measure_on

    with cluster_at(options.ray, options.slurm, options.cache, progress.note) as cluster:
        return measure_on(cluster, options, selection, progress)


def _simulate(options: RunOptions, selection: Selection) -> None:
    """Predicts the cells and writes the report."""
    from harness.batch.progress import make_job_progress
    from harness.run.measure import predict
    from reports.build import build

    with make_job_progress() as progress:
        done = predict(options, selection, partial(progress.advance, "predicting cells"))
    written = build([done.out], cache=options.cache)
    _print_summary(done.records)
    say(f"report: {', '.join(map(str, written))}", err=True)
    for record in done.records:
        if record.status not in ("ok", record.spec.expect):
            say(f"{record.status}: {record.spec.name}: {record.reason}", err=True)


def _print_cells(cells: Sequence[RunSpec], as_json: bool) -> None:
    from harness.api import to_json

    for cell in cells:
        if as_json:
            say_json(to_json(cell.without_secrets()) | {"fingerprint": cell.fingerprint()})
            continue
        batch = f"batch {cell.policy.block_size}" if cell.tune == "none" else cell.tune.replace("_", " ")
        words = [cell.fingerprint(), cell.name, cell.model.id, cell.workload.label, batch, f"x{cell.repeats}"]
        if cell.expect != "ok":
            words.append(f"expect {cell.expect}")
        if cell.reference:
            words.append("reference")
        say("  ".join(words))


def _runnable(cache: Path) -> list[str]:
    """Shipped suites whose requirements this machine meets."""
    from harness.hardware.requirements import check_requirements
    from harness.suite.shipped import shipped_suites

    return [suite.name for suite in shipped_suites() if not check_requirements(suite, cache)]


def _print_summary(records: Sequence[RunRecord]) -> None:
    """Prints one screen on stdout; the exit code does not depend on anybody reading all of it."""
    from reports.terminal import summary_text

    say(summary_text(records))
