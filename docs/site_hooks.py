"""Hooks of the site: links to the source tree, the command line's help, and Markdown inside the reports' <details>."""

import posixpath
import re
from pathlib import Path
from typing import Any

import click

from harness.cli.main import cli

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Pages link to source files and folders for readers on a code host; the site has no pages of them.

    A link to a folder with a README goes to that page, and a link to a file outside the site becomes its path. A link
    to what does not exist stays, so that the strict build fails.
    """
    if "<!-- help -->" in markdown:
        return markdown.replace("<!-- help -->", _help(cli, None, "harness"))
    docs, here = Path(config.docs_dir), posixpath.dirname(page.file.src_uri)

    def on_site(path: str) -> bool:
        file = files.get_file_from_path(path)
        return file is not None and file.inclusion.is_included()

    def resolve(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        if on_site(path) or not (docs / path).exists():
            return match[0]
        if on_site(f"{path}/README.md"):
            return f"[{text}]({target.rstrip('/')}/README.md)"
        return f"`{(docs / path).resolve().relative_to(docs.resolve().parent)}`"

    return _LINK.sub(resolve, markdown).replace("<details>", "<details markdown>")


def _help(command: click.Command, parent: click.Context | None, name: str) -> str:
    """The output of --help for a command and those below it, a section each."""
    context = click.Context(command, parent, name, terminal_width=78, **command.context_settings)
    section = f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n\n"
    if not isinstance(command, click.Group):
        return section
    below = ((key, command.get_command(context, key)) for key in sorted(command.list_commands(context)))
    return section + "".join(_help(inner, context, key) for key, inner in below if inner is not None)
