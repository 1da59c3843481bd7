"""Renders templates as HTML and Markdown that show every value literally, and writes files atomically."""

from pathlib import Path
from typing import Any

import jinja2

from harness.api import HarnessError
from harness.common.files import replace_with
from reports.text import clean, markdown

TEMPLATES = Path(__file__).parent / "templates"


def html_of(template: str, **values: Any) -> str:
    """Renders an HTML template; escapes all values except Markup."""
    environment = _environment(autoescape=True, finalize=lambda v: clean(v) if type(v) is str else v)
    return environment.get_template(template).render(**values)


def markdown_of(template: str, **values: Any) -> str:
    """Renders a Markdown template; escapes every expression with `text.markdown`, since autoescape covers only HTML."""
    return _environment(autoescape=False, finalize=markdown).get_template(template).render(**values)


def write(path: Path, text: str) -> None:
    """Replaces a file atomically. Raises HarnessError for a path that cannot be written."""
    if is_folder(path) or not path.name:
        raise HarnessError(f"cannot write {path}: it is a folder; name a file with --out")
    try:
        replace_with(path, text)
    except OSError as exc:
        raise HarnessError(f"cannot write {path}: {exc.strerror or exc}; choose another place with --out") from exc


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; False also for names that the file system rejects."""
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
