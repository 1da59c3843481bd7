"""`harness explain`: what a key of a suite means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from harness.cli.errors import say, say_json
from harness.cli.options import json_option
from harness.cli.tables import print_rows

if TYPE_CHECKING:
    from harness.suite.keys import Key


@click.command()
@click.argument("names", nargs=-1, metavar="[KEY]...")
@json_option("Print one JSON object per key.")
def explain(names: tuple[str, ...], as_json: bool) -> None:
    """Say what a KEY of a suite means: its unit, its default, an example, and which engines heed it. Without one, list
    all keys.

    \b
    Examples:
      harness explain policy.gpu_batch_size
      harness explain threads candidates
    """
    from harness.suite.keys import find, keys

    every = [key for section in keys().values() for key in section.values()]
    found = [key for name in names for key in find(name)] or every
    if as_json:
        for key in found:
            say_json({"key": key.path} | asdict(key))
    elif names:
        say("\n\n".join("\n".join(_lines(key)) for key in found))
    else:
        print_rows([{"key": key.path, "in": key.section, "meaning": _shortened(key.means)} for key in every])


def _lines(key: Key) -> Iterator[str]:
    where = {"suite": "of the suite", "cell": "of a cell, or of the suite for all cells"}
    yield f"{key.path} ({where.get(key.section, f'under {key.path.rpartition(chr(46))[0]}')})"
    yield from textwrap.wrap(key.means, 100, initial_indent="  ", subsequent_indent="  ")
    yield f"  unit      {key.unit or 'none'}"
    yield f"  default   {key.default or 'none: it must be given'}"
    engines = ", ".join(key.engines) or "all"
    yield f"  heeded by {engines}{key.note and f'; {key.note}'}"
    yield f"  example   {key.example}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 80, placeholder=" ...")
