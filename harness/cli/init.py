"""`harness init`: a suite to begin with, for a model and this machine."""

from pathlib import Path

import click

from harness.cli.errors import say


@click.command()
@click.option("--model", required=True, help="A folder of safetensors, a GGUF file, a hub id, or package:NAME.")
@click.option("--memory", metavar="SIZE", help="Memory limit of each engine [default: by the model and this machine].")
@click.option("--out", type=click.Path(path_type=Path), default=Path("suite.yaml"), show_default=True,
              help="The file to write; one that exists is kept.")  # fmt: skip
def init(model: str, memory: str | None, out: Path) -> None:
    """Write a commented suite that compares the engines of this machine on a model under one memory limit.

    \b
    Examples:
      harness init --model facebook/opt-1.3b
      harness init --model ./qwen3.gguf --memory 2GiB --out qwen.yaml
    """
    from harness.suite.first import first_suite, write_new

    write_new(out, first_suite(model, memory, out.stem))
    say(f"wrote {out}. Next:")
    say(f"  harness validate {out}")
    say(f"  harness run {out} --dry-run    list its cells")
    say(f"  harness run {out}              measure them, and write a report")
