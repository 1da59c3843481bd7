"""`harness images`: the engines' container images."""

from functools import partial
from pathlib import Path

import click

from harness.cli.errors import say
from harness.cli.options import json_option
from harness.cli.tables import print_rows


@click.group()
def images() -> None:
    """Build the engines' images for `--launcher docker` from this checkout, and list them."""


@images.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--build-arg", "arguments", multiple=True, metavar="K=V",
              help="An argument of the Dockerfile, such as BASE_IMAGE; may be repeated.")  # fmt: skip
@click.option("--wheels", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of wheels that pip prefers to an index, such as a CPU build of torch.")  # fmt: skip
@click.option("--host-network", is_flag=True, help="Build in the host's network, where Docker has none of its own.")
def build(names: tuple[str, ...], arguments: tuple[str, ...], wheels: Path | None, host_network: bool) -> None:
    """Build the images NAMES, of environments and of the server (harness images ls). PIP_INDEX_URL,
    PIP_EXTRA_INDEX_URL, PIP_CERT and PIP_DEFAULT_TIMEOUT configure pip.

    \b
    Examples:
      harness images build offload accelerate
      harness images build offload --build-arg BASE_IMAGE=python:3.12-slim --wheels ./wheels
    """
    from harness.common.words import nearest
    from harness.launchers import images as store
    from harness.suite.check import each

    known = store.names()
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"unknown environment {unknown[0]!r}; {nearest(unknown[0], known)}")
    tell = partial(say, err=True)
    for built in each(lambda name: (name, store.build(name, arguments, wheels, host_network, tell)), names):
        say("  ".join(built))


@images.command("ls")
@json_option()
def list_images(as_json: bool) -> None:
    """List the images: which are built, and whether from this code."""
    from harness.launchers import images as store

    print_rows(list(store.built()), as_json)
