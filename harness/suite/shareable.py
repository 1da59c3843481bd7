"""A suite's text as it is kept beside records: without secrets."""

import re
from collections.abc import Iterator
from pathlib import Path

from harness.api import HIDDEN, HarnessError, is_secret, is_secret_option, without_logins
from harness.common.regular_file import read_regular
from harness.suite import yaml_source
from harness.suite.yaml_node import Node

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as YAML divides lines
#: An anchor or a tag before a scalar, and a scalar in quotes.
_BEFORE = re.compile(r"(?:[&!]\S*\s+)*")
_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^']|'')*'""", re.DOTALL)


def shareable_text(path: Path) -> str:
    """The text of a suite file with `***` for the values that may be secrets in any `env` or `options` of it, and for
    logins in URLs, wherever they are.

    Raises OSError, and HarnessError for a file that is no YAML, or a secret that is neither quoted nor on one line.
    """
    text = read_regular(path).decode("utf-8-sig")
    if "env" not in text and "options" not in text:
        return without_logins(text)
    lines = [0, *(line.end() for line in _BREAK.finditer(text))]
    for at, value in sorted(set(_secrets(yaml_source.parse(text, ""))), reverse=True):  # the last first: offsets stay
        before = _BEFORE.match(text, lines[at[0] - 1] + at[1] - 1)
        assert before is not None  # it matches nothing at all, too
        start = before.end()
        quoted = _QUOTED.match(text, start)
        if not quoted and not text.startswith(value, start):
            raise HarnessError(f"{path}:{at[0]}:{at[1]}: a value that may be a secret goes on one line, in quotes")
        end = quoted.end() if quoted else start + len(value)
        text = f"{text[:start]}'{HIDDEN}'{text[end:]}"
    return without_logins(text)


def _secrets(node: Node, section: str = "", name: str = "") -> Iterator[tuple[tuple[int, int], str]]:
    """The position (line and column, from 1) and the value of each text that may be a secret. `section`: `env` or
    `options` below one of these, and `name` the keys since then."""
    text = isinstance(node.value, str)
    if (text and is_secret(name)) if section == "env" else (section and is_secret_option(name, node.value)):
        _, line, column = node.at.split(":")
        yield (int(line), int(column)), str(node.value)
    for key, child in node.entries.items():
        if section:
            yield from _secrets(child, section, f"{name} {key}")
        else:
            yield from _secrets(child, key if key in ("env", "options") else "")
    for item in node.items:
        yield from _secrets(item, section, name)
