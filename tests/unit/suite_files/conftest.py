"""Suites that tests write as texts, in a file of their own folder."""

from functools import partial
from pathlib import Path

import pytest

from harness.api import SuiteSpec
from tests.unit.suite_files.texts import loaded, refusal_of


@pytest.fixture
def load(tmp_path: Path) -> partial[SuiteSpec]:
    return partial(loaded, tmp_path)


@pytest.fixture
def error(tmp_path: Path) -> partial[str]:
    return partial(refusal_of, tmp_path)
