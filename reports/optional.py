"""Reports a missing optional package in one line with its remedy."""

import contextlib
from collections.abc import Iterator

from harness.api import HarnessError


@contextlib.contextmanager
def optional_packages(feature: str) -> Iterator[None]:
    """Turns an ImportError into a HarnessError that names `feature`, the package and the remedy."""
    try:
        yield
    except ImportError as exc:
        remedy = "pip install 'offload-harness[report]'"
        raise HarnessError(f"{feature} needs the package {exc.name or exc}: {remedy}") from exc
