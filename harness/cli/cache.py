"""`harness cache`: what the cache folder holds, its removal, and its check."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_FAILED, say, say_json
from harness.cli.options import cache_option, json_option
from harness.cli.tables import Row, print_rows
from harness.common.files import default_cache, nearest_existing

if TYPE_CHECKING:
    from harness.cache.clean import Choice
    from harness.cache.entries import Entry

_OPTION = cache_option("The cache folder")


@click.group()
def cache() -> None:
    """Show, clean and check the cache folder: models, converted weights, environments, kernels, what was measured."""


@cache.command("ls")
@json_option("Print one JSON object; sizes in bytes, times in seconds of the epoch.")
@_OPTION
def list_cache(as_json: bool, cache: Path) -> None:
    """List what there is by kind, with its size, its last use and what made it.

    A `leftover` is of a process that was killed; what is `outdated` is complete, and nothing reads it any more.

    \b
    Example:
      harness cache ls
    """
    from harness.cache.entries import entries

    found = entries(cache)
    total, free = sum(entry.size for entry in found), shutil.disk_usage(nearest_existing(cache)).free
    if as_json:
        fields = ("kind", "name", "size", "used", "made_by", "state")
        rows: list[Row] = [{name: getattr(entry, name) for name in fields} for entry in found]
        say_json({"folder": str(cache), "entries": rows, "total": total, "free": free})
        return
    _print(found)
    say(f"{cache}: {_size(total)} in {len(found)} entries; {_size(free)} free")


@cache.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--models", is_flag=True, help="Dummy and unpacked checkpoints.")
@click.option("--downloads", is_flag=True, help="Downloads from the hub.")
@click.option("--weights", is_flag=True, help="Weights as engines converted them.")
@click.option("--environments", is_flag=True, help="Engines' environments.")
@click.option("--kernels", is_flag=True, help="Compiled kernels.")
@click.option("--all", "everything", is_flag=True, help="All that the harness made, what it measured included.")
@click.option("--unused-for", metavar="TIME", help="Only what was not used for so long, such as 30d.")
@click.option("--outdated", is_flag=True, help="Only what nothing reads any more.")
@click.option("--dry-run", is_flag=True, help="Print what would go, and stop.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_OPTION
def clean(cache: Path, dry_run: bool, yes: bool, **options: Any) -> None:
    """Remove what killed processes left, and what the options or NAMES (harness cache ls) say.

    Nothing is removed while a run or a job uses the cache, nor anything that the harness did not make. What is needed
    again is made again.

    \b
    Examples:
      harness cache clean                       only what killed processes left
      harness cache clean --weights --dry-run
      harness cache clean --unused-for 30d      models, downloads, weights, environments and kernels
    """
    from harness.cache.clean import chosen, remove
    from harness.cache.entries import entries

    going = chosen(entries(cache), _choice(**options))
    size = sum(entry.size for entry in going)
    if not going:
        say("nothing to remove", err=True)
        return
    _print(going)
    if dry_run:
        say(f"{_size(size)} in {len(going)} entries would be removed")
        return
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here; give --yes, or --dry-run to see what would go")
        if not click.confirm(f"Remove {_size(size)}?", err=True):
            return
    kept: list[str] = []
    freed = remove(cache, going, kept.append)
    for text in kept:
        say(text, err=True)
    say(f"{_size(freed)} freed")
    sys.exit(EXIT_FAILED if kept else 0)


@cache.command()
@json_option("Print one JSON object for each damaged entry.")
@_OPTION
def verify(as_json: bool, cache: Path) -> None:
    """Check that models, converted weights, environments, kernels and kept figures are whole; exit code 1 if not.

    Compares sizes with what headers and manifests say; reads no weights.

    \b
    Example:
      harness cache verify
    """
    from harness.cache.entries import entries
    from harness.cache.verify import verify as checks

    checked = list(checks(entries(cache)))
    damaged = [result for result in checked if result.problem]
    for result in damaged:
        command = _clean_command(result.entry.name, cache)
        if as_json:
            say_json({"name": result.entry.name, "problem": result.problem, "remove": command})
        else:
            say(f"{result.entry.name}: {result.problem}; to remove it: {command}")
    unknown = sum(result.problem is None for result in checked)
    say(f"{len(checked) - unknown} entries checked, {len(damaged)} damaged; {unknown} do not tell", err=True)
    sys.exit(EXIT_FAILED if damaged else 0)


def _choice(names: tuple[str, ...], everything: bool, unused_for: str | None, outdated: bool, **flags: bool) -> Choice:
    """The options of `clean` as a choice; `flags` are those of the kinds. Raises UsageError for names beside others."""
    from harness.cache.clean import KNOWN, REPLACEABLE, Choice
    from harness.common.units import parse_duration

    kinds = KNOWN if everything else tuple(kind for kind in REPLACEABLE if flags[kind])
    if names and (kinds or unused_for or outdated):
        raise click.UsageError("give names, or options that choose, not both")
    before = None if unused_for is None else time.time() - parse_duration(unused_for)
    return Choice(names, kinds, outdated, before)


def _clean_command(name: str, cache: Path) -> str:
    elsewhere = ["--cache-dir", str(cache)] if cache != default_cache() else []
    return shlex.join(["harness", "cache", "clean", name, *elsewhere])


def _print(entries: Sequence[Entry]) -> None:
    print_rows(
        [
            {
                "kind": entry.kind,
                "name": entry.name,
                "size": _size(entry.size),
                "last use": time.strftime("%Y-%m-%d", time.localtime(entry.used)),
                "made by": entry.made_by,
                "state": entry.state,
            }
            for entry in entries
        ]
    )


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
