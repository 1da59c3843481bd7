"""Makes strings of suites, records, models and engines safe to show: anybody may have written them."""

import re

from harness.api import without_logins

# Control characters but tab and line feed, marks and overrides of the direction of writing, line separators, and lone
# surrogates: they hide, reorder or overwrite text, command the terminal, or have no UTF-8 encoding.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Commands that a CI server reads in a job's log: GitHub's `::error::` at the start of a line and `##[error]` anywhere,
# Azure's `##vso[...]` and TeamCity's `##teamcity[...]`.
_LEADING_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_COMMAND = re.compile(r"#(?=#[a-z]*\[)")


def clean(text: str) -> str:
    """`text` with characters that a terminal or a page would obey replaced by U+FFFD; tabs and line feeds stay."""
    return _UNSAFE.sub("\ufffd", text.replace("\r\n", "\n"))


def printable(text: str) -> str:
    """`clean` text for a terminal or a job's log, without logins in URLs, and without commands for the CI server that
    reads the log."""
    return _COMMAND.sub("# ", _LEADING_COMMAND.sub(r"\1: ", clean(without_logins(text))))


#: The end of a line that later characters may make a command of, a login or a line's end.
_OPEN_END = re.compile(r"(?:^[^\S\n]*:+|(?<!#)#+[a-z]*|\r|(?<!\S)(?>\S*?:/)\S*+)\Z")


class GrowingPrintable:
    """`printable` of a text that comes in pieces: what is returned for them together is `printable` of the whole."""

    def __init__(self) -> None:
        self._text = ""  # of the last line
        self._shown = 0  # characters of it

    def add(self, piece: str) -> str:
        """What a further piece settles; a few characters may wait for the next."""
        lines, feed, self._text = (self._text + piece).rpartition("\n")
        settled = self._next(lines + feed)
        if feed:
            self._shown = 0
        return settled + self._next(_OPEN_END.sub("", self._text))

    def end(self) -> str:
        """What is left."""
        return self._next(self._text)

    def _next(self, text: str) -> str:
        """What is new of the last line."""
        safe = printable(text)
        shown, self._shown = self._shown, max(self._shown, len(safe))
        return safe[shown:]
