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


def model_option() -> _Decorator:
    """`--model`, which a command needs."""
    what = "A folder of safetensors, a GGUF file, a hub id, or package:NAME."
    return click.option("--model", required=True, help=what)


def memory_option() -> _Decorator:
    """`--memory`: a size in words, or None."""
    what = "RAM that the engine plans for, such as 6GiB; not enforced [default: most of what is free]."
    return click.option("--memory", metavar="SIZE", help=what)


def set_option(example: str) -> _Decorator:
    """`--set`, as the argument `overrides`: a cell's keys."""
    return click.option("--set", "overrides", multiple=True, metavar="K=V",
                        help=f"Override policy, limits, options or model: {example}.")  # fmt: skip


def cluster_options(does: str) -> _Decorator:
    """`--ray` and `--slurm`: a cluster that `does` what this host would."""
    ray = click.option("--ray", metavar="auto|ADDRESS",
                       help=f"{does} a Ray cluster: the one on this host, or that of a head at HOST:PORT.")  # fmt: skip
    slurm = click.option("--slurm", metavar="KEY=VALUE,...",
                         help=f"{does} SLURM jobs: nodes=4,cpus_per_task=16,timeout_min=240 and so on.")  # fmt: skip
    return lambda command: ray(slurm(command))


def json_option(help_text: str = "Print JSON.") -> _Decorator:
    """`--json`, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)
