"""`harness completion`: the script that completes commands and options in a shell."""

import click
from click.shell_completion import get_completion_class

from harness.cli.errors import say


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and their values in a SHELL.

    \b
    Examples:
      source <(harness completion bash)                                      in ~/.bashrc
      source <(harness completion zsh)                                       in ~/.zshrc
      harness completion fish > ~/.config/fish/completions/harness.fish      once
    """
    completer = get_completion_class(shell)
    assert completer is not None, "click completes these shells"
    say(completer(context.find_root().command, {}, "harness", "_HARNESS_COMPLETE").source())
