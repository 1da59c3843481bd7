"""`harness validate`: checks suite files."""

import sys
from typing import Any

import click

from harness.cli.errors import EXIT_USAGE, say, say_json
from harness.cli.options import json_option


@click.command()
@click.argument("suites", nargs=-1, required=True, metavar="SUITE...")
@json_option("Print one JSON object per suite.")
def validate(suites: tuple[str, ...], as_json: bool) -> None:
    """Check suite files and report each problem with its file, its line and the nearest valid key.

    \b
    Example:
      harness validate suites/*.yaml
    """
    valid = [_check(name, as_json) for name in suites]  # check all of them, not only up to the first problem
    sys.exit(0 if all(valid) else EXIT_USAGE)


def _check(name: str, as_json: bool) -> bool:
    """Prints what is in a suite, or what is wrong with it; returns whether it is valid."""
    from harness.api import HarnessError
    from harness.suite.config import load_suite
    from harness.suite.shipped import find_suite
    from reports.text import plural

    result: dict[str, Any]
    try:
        suite = load_suite(find_suite(name))
    except HarnessError as exc:
        result, text = {"file": name, "ok": False, "errors": str(exc).splitlines()}, str(exc)
    else:
        launches = sum(c.repeats for c in suite.cells)
        result = {"file": name, "ok": True, "cells": len(suite.cells), "launches": launches}
        text = f"{name}: ok, {plural(len(suite.cells), 'cell')}, {plural(launches, 'launch', 'launches')}"
    if as_json:
        say_json(result)
    else:
        say(text, err=not result["ok"])
    return bool(result["ok"])
