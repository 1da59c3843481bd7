"""Suites as texts, for tests of what they expand to and how they are refused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.api import HarnessError, SuiteSpec
from harness.suite.config import load_suite

HEAD = "name: s\nmodel: {id: m}\nworkload: {}\n"

CELL = HEAD + "engine: fake\n"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Of CPU time of its own: a busy machine takes none away."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def names(suite: SuiteSpec) -> list[str]:
    return [cell.name for cell in suite.cells]


def loaded(folder: Path, text: str | bytes, *overrides: str) -> SuiteSpec:
    """The suite of a text, in a file x.yaml of the folder, of which messages do not tell."""
    path = folder / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    try:
        return load_suite(path, overrides)
    except HarnessError as exc:
        raise HarnessError(str(exc).replace(f"{folder}/", "")) from None


def refusal_of(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The text of the error that a suite gives."""
    with pytest.raises(HarnessError) as caught:
        loaded(folder, text, *overrides)
    return str(caught.value)
