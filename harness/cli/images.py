"""`harness images`: the engines' images."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.errors import one_line_errors


@click.group()
def images() -> None:
    """Images of the engines for `--launcher docker`: build them from this checkout, and list them."""


@images.command("build")
@click.argument("names", nargs=-1, required=True)
@click.option("--build-arg", "arguments", multiple=True, metavar="K=V", help="Of the Dockerfile, such as BASE_IMAGE.")
@click.option("--wheels", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of wheels that are found before an index, such as a CPU build of torch.")  # fmt: skip
@click.option("--host-network", is_flag=True, help="Build in the host's network, where Docker has none.")
def images_build(names: tuple[str, ...], arguments: tuple[str, ...], wheels: Path | None, host_network: bool) -> None:
    """Build the images of environments NAMES (harness images ls). Settings of pip come from PIP_INDEX_URL,
    PIP_EXTRA_INDEX_URL, PIP_CERT and PIP_DEFAULT_TIMEOUT.

    \b
    Examples:
      harness images build offload accelerate
      harness images build offload --build-arg BASE_IMAGE=python:3.12-slim --wheels ./wheels
    """
    with one_line_errors():
        from harness import registry
        from harness.common.words import nearest
        from harness.launchers import images as made
        from harness.suite.check import each

        def say(text: str) -> None:
            click.echo(text, err=True)

        known = registry.environments()
        if unknown := [name for name in names if name not in known]:
            raise click.UsageError(f"unknown environment {unknown[0]!r}; {nearest(unknown[0], known)}")
        for built in each(lambda name: (name, made.build(name, arguments, wheels, host_network, say)), names):
            click.echo("  ".join(built))


@images.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def images_ls(as_json: bool) -> None:
    """List the images: which are built, and of this code."""
    with one_line_errors():
        from harness.common.tables import print_rows
        from harness.launchers import images as made

        print_rows(list(made.built()), as_json)
