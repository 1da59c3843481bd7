"""The `harness` command: assembles the commands lazily, one module each, and turns their errors into one line."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

import click

from harness.cli.errors import one_line_errors, open_streams, say, settle_stderr
from harness.cli.signals import stopping

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
#: Each is the object of that name in the module of that name beside this one. They import what is slow to import
#: inside functions, because the help of `harness` loads them all.
_COMMANDS = ("cache", "calibrate", "chat", "check-model", "compare", "completion", "doctor", "explain", "generate",
             "history", "images", "init", "lm-eval", "ls", "plan", "report", "run", "schema", "serve",
             "tune", "validate")  # fmt: skip
#: What `harness` alone says.
_START = """\
Runs, compares and evaluates large language models that do not fit the device's memory. Begin with

  harness doctor                                      what this machine can run, and what mends the rest
  harness generate --model M --prompt "Water boils"   an answer from a model: a folder, a .gguf file or a hub id
  harness init --model M                              a suite for this machine; harness run suite.yaml measures it
  harness run quickstart                              a small comparison of engines, with a report
  harness plan facebook/opt-6.7b --prompt-len 512 --gen-len 32 --hardware t4_gcp

harness --help lists all commands, harness COMMAND --help the options of one."""


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

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with one_line_errors():  # of --help and --version, which print here
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@click.group(cls=_Commands, commands=cast(Any, dict.fromkeys(_COMMANDS)), context_settings=_CONTEXT,  # names to suggest
             invoke_without_command=True)  # fmt: skip
@click.version_option(package_name="offload-harness", prog_name="harness")
@click.pass_context
def cli(context: click.Context) -> None:
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
      harness chat --model M --memory 4GiB        talk with a model in the terminal
      harness serve --model M --memory 4GiB       serve a model to clients of OpenAI's API
      harness cache clean --unused-for 30d        free the disk of models and environments that nothing uses

    Exit codes: 0 ok; 1 a cell or a line of a job failed, or compare found a regression; 2 bad usage or suite;
    3 the hardware does not meet the suite; 4 the limits are too small; 5 a comparison could not be decided;
    130, 143, 129 ended by Ctrl-C, SIGTERM, SIGHUP (run the same command again to resume).
    """
    if context.invoked_subcommand is None:
        say(_START)


def main() -> None:
    """Runs the command. Called by `harness.__main__`.

    The group handles the errors of commands; this handles what happens around them, where click would exit with 1 on
    a signal and Python with 120 for output that it cannot flush.
    """
    # pydantic looks for plug-ins of its own in all that is installed, and one damaged package would end every command
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    open_streams()
    try:
        with one_line_errors(), stopping(), _completing():
            try:
                _require_environment()
                sys.exit(cli.main(standalone_mode=False))
            finally:
                sys.stdout.flush()
    finally:
        settle_stderr()
        gc.freeze()  # else Python ends by collecting all that torch imported, for two seconds on a slow core


def _require_environment() -> None:
    """Raises HarnessError for a variable that compilers and numpy's import would fail on, in words of their own."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not (epoch.isascii() and epoch.isdigit()):
        from harness.api import HarnessError

        raise HarnessError(f"the environment's SOURCE_DATE_EPOCH is {epoch}: expected whole seconds; unset it")


@contextlib.contextmanager
def _completing() -> Iterator[None]:
    """Where a shell asks for completions, click reads further variables, which only shells set rightly."""
    try:
        yield
    except (KeyError, ValueError) as exc:
        if "_HARNESS_COMPLETE" not in os.environ:
            raise
        from harness.api import HarnessError

        raise HarnessError("_HARNESS_COMPLETE is for the script of `harness completion`; unset it") from exc
