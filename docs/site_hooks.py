"""Hooks of the site: links from pages to the source tree, and Markdown inside the reports' <details>."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Pages link to source files and folders for readers on a code host; the site has no pages of them.

    A link to a folder with a README goes to that page, and a link to a file outside the site becomes its path. A link
    to what does not exist stays, so that the strict build fails.
    """
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
