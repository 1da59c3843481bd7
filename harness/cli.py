"""The `harness` command. Imports are made inside commands, so that help and validation stay fast."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from harness.api import Isolation
from harness.cli_errors import (
    EXIT_FAILED,
    EXIT_HARDWARE,
    EXIT_INFEASIBLE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    drop_stdout,
    one_line_errors,
)
from harness.cli_images import images
from harness.cli_plan import calibrate, check_model, lm_eval, plan

if TYPE_CHECKING:
    from harness.api import RunSpec, SuiteSpec


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="offload-harness", prog_name="harness")
def cli() -> None:
    """Run, compare and evaluate large language models that do not fit the device's memory.

    \b
    Examples:
      harness run suites/quickstart.yaml          measure, and write results/quickstart/report.html
      harness run quickstart --dry-run            show the cells without running them
      harness validate suites/*.yaml              check suite files
      harness ls engines                          what can be compared on this machine
      harness report results/quickstart           write the report again from its records
      harness plan facebook/opt-30b --prompt-len 512 --gen-len 32 --hardware t4_gcp
      harness generate --model M --input prompts.jsonl --output answers.jsonl

    Exit codes: 0 ok; 1 a cell or a line of a job failed; 2 bad usage or suite; 3 the hardware does not meet the
    suite; 4 the limits are too small; 130 interrupted (run the same command again to go on).
    """


for _command in (plan, calibrate, check_model, lm_eval, images):
    cli.add_command(_command)


@cli.command()
@click.argument("suite")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory [default: results/<suite name>].")
@click.option("--engine", "engines", multiple=True, metavar="E", help="Only cells of this engine; may be repeated.")
@click.option("--cell", "names", multiple=True, metavar="NAME", help="Only this cell; may be repeated.")
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override in every cell: policy.schedule=row.")
@click.option("--shard", metavar="I/N", help="Run the I-th of N disjoint parts of the suite (1-based).")
@click.option("--launcher", type=click.Choice(get_args(Isolation)),
              help="A process, one in an environment of the engine's own, or a container.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start over: earlier records are set aside, not resumed.")
@click.option("--simulate", is_flag=True, help="Predict every cell for --hardware instead of running it.")
@click.option("--hardware", metavar="H", help="With --simulate: see harness plan [default: local].")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data of accuracy tasks [default: the hub].")
@click.option("--dry-run", is_flag=True, help="Print the cells and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the cells as JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Models and remembered searches [$HARNESS_CACHE].")
def run(
    suite: str, out: Path | None, engines: tuple[str, ...], names: tuple[str, ...], overrides: tuple[str, ...],
    shard: str | None, launcher: str | None, fresh: bool, simulate: bool, hardware: str | None,
    data_dir: Path | None, dry_run: bool, as_json: bool, cache_dir: Path | None,
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
        from harness.config import load_suite
        from harness.registry import ENGINES

        path = _find_suite(suite)
        overrides += (f"launcher={launcher}",) if launcher else ()
        loaded = load_suite(path, overrides, ENGINES)
        cells = _select(loaded, engines, names, shard)
        if dry_run:
            _print_cells(cells, as_json)
            return
        if not cells:
            click.echo(f"shard {shard} holds no cells of {loaded.name}: nothing to do", err=True)
            return
        if simulate:
            sys.exit(_simulate(loaded, cells, path, overrides, out, cache_dir, hardware or "local"))
        if data_dir is not None and not data_dir.is_dir():
            raise HarnessError(f"--data-dir {data_dir}: no such folder")
        sys.exit(_run(loaded, cells, path, overrides, out, cache_dir, fresh, data_dir))


def _run(
    suite: SuiteSpec, cells: list[RunSpec], path: Path, overrides: tuple[str, ...],
    out: Path | None, cache: Path | None, fresh: bool, data: Path | None,
) -> int:  # fmt: skip
    from harness import runner
    from harness.progress import make_progress
    from harness.requirements import check_requirements
    from harness.store import RECORDS
    from reports.build import build

    out = out or Path("results") / suite.name
    cache = cache or runner.default_cache()
    resuming = (out / RECORDS).exists()
    if lacking := check_requirements(suite, cache, resuming):
        click.echo(f"harness: this machine does not meet {suite.name}: {'; '.join(lacking)}", err=True)
        click.echo(f"shipped suites that would run here: {', '.join(_runnable(cache)) or 'none'}", err=True)
        return EXIT_HARDWARE
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means to go on
        signal.signal(signal.SIGHUP, _interrupt)
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
        click.echo(f"interrupted; {again} to go on (records: {out / RECORDS})", err=True)
        return EXIT_INTERRUPTED
    written = build([out])
    with contextlib.suppress(BrokenPipeError):  # who reads only the first lines still gets the true exit code
        _print_summary(records)
    click.echo("report: " + ", ".join(str(p) for p in written), err=True)
    failed = runner.unexpected(records)
    for record in failed:
        click.echo(f"failed: {record.spec.name} repeat {record.repeat + 1}: {record.status}: {record.reason}", err=True)
    return EXIT_FAILED if failed else 0


def _simulate(
    suite: SuiteSpec, cells: list[RunSpec], path: Path, overrides: tuple[str, ...],
    out: Path | None, cache: Path | None, hardware: str,
) -> int:  # fmt: skip
    from harness.job_progress import make_job_progress
    from harness.runner import default_cache
    from harness.simulation import simulate
    from reports.build import build

    out = out or Path("results") / f"{suite.name}-{Path(hardware).stem}-simulated"
    command = ["harness", "run", path.name if path.is_absolute() else str(path), *_as_options(overrides)]
    command += ["--simulate", "--hardware", hardware]
    with make_job_progress() as progress:
        records = simulate(cells, path, out, hardware, cache or default_cache(), shlex.join(command),
                           lambda done, total: progress.advance("predicting cells", done, total))  # fmt: skip
    written = build([out])
    with contextlib.suppress(BrokenPipeError):
        _print_summary(records)
    click.echo("report: " + ", ".join(str(p) for p in written), err=True)
    for record in records:
        if record.status not in ("ok", record.spec.expect):
            click.echo(f"{record.status}: {record.spec.name}: {record.reason}", err=True)
    return 0


@cli.command()
@click.option("--model", required=True, help="A folder of safetensors, a GGUF file, or a hub id.")
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Requests, one a line.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Answers, one for each line.")
@click.option("--engine", default="offload", show_default=True, help="See harness ls engines.")
@click.option(
    "--memory", metavar="SIZE", help="RAM for the model's work, such as 6GiB [default: most of what is free]."
)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="For lines without one.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="For lines without one; each gets its own.")  # fmt: skip
@click.option(
    "--set", "overrides", multiple=True, metavar="K=V", help="policy, limits, options or model: policy.schedule=row."
)
@click.option("--fresh", is_flag=True, help="Start over: earlier answers are set aside, not gone on with.")
@click.option("--dry-run", is_flag=True, help="Read and check the lines, say what would be run, and stop.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Models and converted weights [$HARNESS_CACHE].")
def generate(
    model: str, source: Path, output: Path, engine: str, memory: str | None, max_tokens: int, seed: int,
    overrides: tuple[str, ...], fresh: bool, dry_run: bool, cache_dir: Path | None,
) -> None:  # fmt: skip
    """Answer a file of requests, as they finish, in a file of answers.

    A line is a request in OpenAI's batch format, {"prompt": "..."} or {"messages": [...]} with its settings beside,
    or in a .txt file the prompt itself. Each gets one line of output, with its number and custom_id; what cannot be
    run is answered with the reason. An interrupted job goes on where it stopped when the same command is given again.

    \b
    Examples:
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl --memory 4GiB --dry-run
    """
    from harness.api import InfeasibleError

    with one_line_errors():
        from harness import generate as job
        from harness.batch_input import BatchJob
        from harness.job_progress import make_job_progress
        from harness.runner import default_cache

        signal.signal(signal.SIGTERM, _interrupt)
        with make_job_progress() as progress:
            try:
                cell = job.cell(model, engine, memory, overrides, progress)
                batch = BatchJob(cell, source, output, cache_dir or default_cache(), max_tokens, seed, fresh)
                tally = job.run(batch, progress, dry_run)
            except InfeasibleError as exc:
                progress.note(f"harness: {exc}")
                sys.exit(EXIT_INFEASIBLE)
            except KeyboardInterrupt:
                rest = " without --fresh" if fresh else ""
                progress.note(f"interrupted; run the same command again{rest} to go on")
                raise
        click.echo(job.summary(tally, dry_run))
        sys.exit(EXIT_FAILED if tally.refused or tally.refused_before else 0)


@cli.command()
@click.argument("suites", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per suite.")
def validate(suites: tuple[str, ...], as_json: bool) -> None:
    """Check SUITE files: every problem with file, line and the nearest valid key."""
    from harness.api import HarnessError
    from harness.config import load_suite
    from harness.registry import ENGINES

    def check(name: str) -> bool:
        try:
            suite = load_suite(_find_suite(name), (), ENGINES)
            launches = sum(c.repeats for c in suite.cells)
            result: dict[str, Any] = {"file": name, "ok": True, "cells": len(suite.cells), "launches": launches}
            text = f"{name}: ok, {len(suite.cells)} cells, {launches} launches"
        except HarnessError as exc:
            result, text = {"file": name, "ok": False, "errors": str(exc).splitlines()}, str(exc)
        click.echo(json.dumps(result) if as_json else text, err=not as_json and not result["ok"])
        return bool(result["ok"])

    with one_line_errors():
        right = [check(name) for name in suites]  # all of them, not only up to the first mistake
        sys.exit(0 if all(right) else EXIT_USAGE)


@cli.command("ls")
@click.argument("what", type=click.Choice(["engines", "suites", "models", "hardware"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where environments are built [$HARNESS_CACHE].")
def list_(what: str, as_json: bool, cache_dir: Path | None) -> None:
    """List engines (and what each lacks here), shipped suites, built-in model shapes, or hardware profiles."""
    with one_line_errors():
        from harness import listing
        from harness.runner import default_cache

        rows = {
            "engines": lambda: listing.engines(cache_dir or default_cache()),
            "suites": listing.suites,
            "models": listing.models,
            "hardware": listing.hardware,
        }
        listing.show(rows[what](), as_json)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="The cache folder to look at [$HARNESS_CACHE].")
def doctor(as_json: bool, cache_dir: Path | None) -> None:
    """Say what this machine can measure, and what stands in the way."""
    with one_line_errors():
        from harness import listing
        from harness.runner import default_cache

        findings = listing.diagnose(cache_dir or default_cache())
        listing.show(findings, as_json)
        sys.exit(EXIT_FAILED if any(f["state"] == "problem" for f in findings) else 0)


@cli.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report [default: the first DIR].")
def report(dirs: tuple[Path, ...], out: Path | None) -> None:
    """Write report.html, report.md and report.csv from the records in DIRS."""
    with one_line_errors():
        from reports.build import build

        for path in build(list(dirs), out):
            click.echo(path)


def _find_suite(name: str) -> Path:
    """A file, or a suite that is shipped with the package, by name."""
    import suites
    from harness.api import HarnessError

    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    shipped = Path(suites.__file__).parent / f"{name}.yaml"
    if shipped.exists():
        return shipped
    known = ", ".join(sorted(p.stem for p in shipped.parent.glob("*.yaml")))
    raise HarnessError(f"no suite file or shipped suite {name!r} (shipped: {known})")


def _select(suite: SuiteSpec, engines: tuple[str, ...], names: tuple[str, ...], shard: str | None) -> list[RunSpec]:
    from harness.api import HarnessError
    from harness.runner import shard as part

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
    from harness.listing import shipped_suites
    from harness.requirements import check_requirements

    return [suite.name for suite in shipped_suites() if not check_requirements(suite, cache)]


def _print_summary(records: list[Any]) -> None:
    """One screen on stdout: what a person wants to know first."""
    from reports.terminal import summary_text

    click.echo(summary_text(records))


def _as_options(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script.

    Commands tell their errors and interruptions themselves; this is for what happens around them, where click would
    answer Ctrl-C with the exit code of a failure.
    """
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        drop_stdout()
        sys.exit(0)


if __name__ == "__main__":
    main()
