"""Packages that only parts of reports need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from harness.api import HarnessError


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """A package that is not there becomes an error with its name and the remedy."""
    try:
        yield
    except ImportError as exc:
        remedy = "pip install 'offload-harness[report]'"
        raise HarnessError(f"{what} needs the package {exc.name or exc}: {remedy}") from exc
