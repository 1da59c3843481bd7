"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.common.files import default_cache

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def cache_option(help_text: str) -> _Decorator:
    """`--cache-dir`, as the argument `cache`: the folder for what is kept between runs."""
    return click.option("--cache-dir", "cache", type=click.Path(path_type=Path), default=default_cache,
                        help=f"{help_text} [default: $HARNESS_CACHE].")  # fmt: skip


def json_option(help_text: str = "Print JSON.") -> _Decorator:
    """`--json`, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)
