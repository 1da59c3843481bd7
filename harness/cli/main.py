"""The `harness` command. Imports are made inside commands, so that help and validation stay fast."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import click

from harness.cli.compare import compare
from harness.cli.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    drop_stdout,
    one_line_errors,
    open_streams,
    say,
)
from harness.cli.generate import generate
from harness.cli.history import history
from harness.cli.images import images
from harness.cli.plan import calibrate, check_model, lm_eval, plan
from harness.cli.run import run

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
      harness compare results/main results/branch say which cells became slower
      harness plan facebook/opt-30b --prompt-len 512 --gen-len 32 --hardware t4_gcp
      harness generate --model M --input prompts.jsonl --output answers.jsonl

    Exit codes: 0 ok; 1 a cell or a line of a job failed, or compare found a regression; 2 bad usage or suite;
    3 the hardware does not meet the suite; 4 the limits are too small; 5 a comparison could not be decided;
    130 interrupted (run the same command again to go on).
    """


for _command in (run, compare, history, generate, plan, calibrate, check_model, lm_eval, images):
    cli.add_command(_command)


@cli.command()
@click.argument("suites", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per suite.")
def validate(suites: tuple[str, ...], as_json: bool) -> None:
    """Check SUITE files: problems, each with file, line and the nearest valid key.

    \b
    Example:
      harness validate suites/*.yaml
    """
    from harness.api import HarnessError
    from harness.suite.config import load_suite
    from harness.suite.shipped import find_suite

    def check(name: str) -> bool:
        try:
            suite = load_suite(find_suite(name))
            launches = sum(c.repeats for c in suite.cells)
            result: dict[str, Any] = {"file": name, "ok": True, "cells": len(suite.cells), "launches": launches}
            text = f"{name}: ok, {len(suite.cells)} cells, {launches} launches"
        except HarnessError as exc:
            result, text = {"file": name, "ok": False, "errors": str(exc).splitlines()}, str(exc)
        say(json.dumps(result) if as_json else text, err=not as_json and not result["ok"])
        return bool(result["ok"])

    with one_line_errors():
        right = [check(name) for name in suites]  # all of them, not only up to the first mistake
        sys.exit(0 if all(right) else EXIT_USAGE)


@cli.command("ls")
@click.argument("what", type=click.Choice(["engines", "suites", "models", "hardware"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where environments are built [$HARNESS_CACHE].")
def list_(what: str, as_json: bool, cache_dir: Path | None) -> None:
    """List engines (and what each lacks here), shipped suites, built-in model shapes, or hardware profiles.

    \b
    Examples:
      harness ls engines
      harness ls hardware --json
    """
    with one_line_errors():
        from harness.cli import listing
        from harness.common.files import default_cache
        from harness.common.tables import print_rows

        rows = {
            "engines": lambda: listing.engines(cache_dir or default_cache()),
            "suites": listing.suites,
            "models": listing.models,
            "hardware": listing.hardware,
        }
        print_rows(rows[what](), as_json)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="The cache folder to look at [$HARNESS_CACHE].")
def doctor(as_json: bool, cache_dir: Path | None) -> None:
    """Say what this machine can measure, and what stands in the way: exit code 1 for a problem.

    \b
    Example:
      harness doctor
    """
    with one_line_errors():
        from harness.cli import listing
        from harness.common.files import default_cache
        from harness.common.tables import print_rows

        findings = listing.diagnose(cache_dir or default_cache())
        print_rows(findings, as_json)
        sys.exit(EXIT_FAILED if any(f["state"] == "problem" for f in findings) else 0)


@cli.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path),
              help="Folder for the report, or a file .html, .md, .csv or .xml [default: the first DIR].")  # fmt: skip
@click.option("--history", "url", metavar="URL", help="Show what this history has of the cells (harness history).")
def report(dirs: tuple[Path, ...], out: Path | None, url: str | None) -> None:
    """Write report.html, report.md, report.csv and report.xml (JUnit) from the records in DIRS.

    \b
    Examples:
      harness report results/quickstart
      harness report results/* --out all.html
      harness report results/nightly --history sqlite:///results/history.db
    """
    with one_line_errors():
        from harness.common.files import default_cache
        from reports.build import build

        gc.disable()  # records are millions of small objects without cycles, and the process ends with them
        for path in build(list(dirs), out, url, default_cache()):
            click.echo(path)


def main() -> None:
    """Entry point of the console script.

    Commands tell their errors and interruptions themselves; this is for what happens around them, where click would
    answer Ctrl-C with the exit code of a failure.
    """
    open_streams()
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
