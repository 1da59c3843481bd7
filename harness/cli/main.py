"""The `harness` command: assembles the commands lazily, one module each, and turns their errors into one line."""

import importlib
import sys
from typing import Any

import click

from harness.cli.errors import one_line_errors, open_streams

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
#: Each is the object of that name in the module of that name beside this one. They import what is slow to import
#: inside functions, because the help of `harness` loads them all.
_COMMANDS = ("calibrate", "check-model", "compare", "doctor", "generate", "history", "images", "lm-eval", "ls", "plan",
             "report", "run", "validate")  # fmt: skip


class _Commands(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"harness.cli.{name}"), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.version_option(package_name="offload-harness", prog_name="harness")
def cli() -> None:
    """Run, compare and evaluate large language models that do not fit the device's memory.

    \b
    Examples:
      harness run suites/quickstart.yaml          measure, and write results/quickstart/report.html
      harness run quickstart --dry-run            show the cells without running them
      harness validate suites/*.yaml              check suite files
      harness ls engines                          list engines and whether they can run here
      harness report results/quickstart           write the report again from its records
      harness compare results/main results/branch say which cells became slower
      harness plan facebook/opt-30b --prompt-len 512 --gen-len 32 --hardware t4_gcp
      harness generate --model M --input prompts.jsonl --output answers.jsonl

    Exit codes: 0 ok; 1 a cell or a line of a job failed, or compare found a regression; 2 bad usage or suite;
    3 the hardware does not meet the suite; 4 the limits are too small; 5 a comparison could not be decided;
    130 interrupted (run the same command again to resume).
    """


def main() -> None:
    """Entry point of the console script.

    The group handles the errors of commands; this handles what happens around them, where click would exit with 1 on
    Ctrl-C.
    """
    open_streams()
    with one_line_errors():
        sys.exit(cli.main(standalone_mode=False))
