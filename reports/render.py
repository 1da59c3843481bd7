"""Renders templates as HTML and Markdown that show every value literally, and writes files atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from harness.api import HarnessError
from harness.common.files import os_errors, replace_with
from harness.common.printable import clean
from reports.text import markdown

TEMPLATES = Path(__file__).parent / "templates"


def html_of(template: str, **values: Any) -> str:
    """Renders an HTML template; escapes all values except Markup, also those in data of a script."""
    environment = _environment(autoescape=True, finalize=lambda v: clean(v) if type(v) is str else v)
    environment.policies["json.dumps_function"] = lambda data, **options: json.dumps(_cleaned(data), **options)
    return environment.get_template(template).render(**values)


def markdown_of(template: str, **values: Any) -> str:
    """Renders a Markdown template; escapes every expression with `text.markdown`, since autoescape covers only HTML."""
    return _environment(autoescape=False, finalize=markdown).get_template(template).render(**values)


def write(path: Path, text: str) -> None:
    """Replaces a file atomically. Raises HarnessError for a path that cannot be written."""
    if is_folder(path) or not path.name:
        raise HarnessError(f"cannot write {path}: it is a folder; name a file with --out")
    with os_errors(f"cannot write {path}", "choose another place with --out"):
        replace_with(path, text)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; False also for names that the file system rejects."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _cleaned(data: Any) -> Any:
    """Plain data with every string `clean`: JSON escapes a character, and the chart shows it again."""
    if isinstance(data, str):
        return clean(data)
    if isinstance(data, Mapping):
        return {_cleaned(key): _cleaned(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_cleaned(value) for value in data]
    return data


def _environment(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
