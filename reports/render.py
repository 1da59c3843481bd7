"""Templates into text: HTML and Markdown that show every value literally."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jinja2

from harness.api import HarnessError
from reports.text import clean, markdown

TEMPLATES = Path(__file__).parent / "templates"


def html_of(template: str, **values: Any) -> str:
    """The HTML of a template; what is no markup of ours is escaped."""
    environment = _environment(autoescape=True, finalize=lambda v: clean(v) if type(v) is str else v)
    return environment.get_template(template).render(**values)


def markdown_of(template: str, **values: Any) -> str:
    """The Markdown of a template. Autoescape knows only HTML; here every expression is escaped in the same way."""
    return _environment(autoescape=False, finalize=markdown).get_template(template).render(**values)


def write(path: Path, text: str) -> None:
    """Writes a file whole, or leaves what was there. Raises HarnessError for a place that cannot be written."""
    if is_folder(path) or not path.name:
        raise HarnessError(f"cannot write {path}: it is a folder; name a file with --out")
    path = Path(os.path.realpath(path))  # a link stays one
    part = path.with_name(f".{path.name}.part")
    try:
        if os.path.lexists(path) and not path.is_file():
            raise HarnessError(f"cannot write {path}: it is not a regular file; choose another place with --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            part.unlink()
        raise HarnessError(f"cannot write {path}: {exc.strerror or exc}; choose another place with --out") from exc


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name. Of a name that no file system takes there is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _environment(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
