"""Reports a missing optional package in one line with its remedy."""

import contextlib
from collections.abc import Iterator

from harness.api import HarnessError
from harness.common.packages import install_extra


@contextlib.contextmanager
def optional_packages(feature: str) -> Iterator[None]:
    """Turns an ImportError into a HarnessError that names `feature`, the package and the remedy."""
    try:
        yield
    except ImportError as exc:
        raise HarnessError(f"{feature} needs the package {exc.name or exc}: {install_extra('report')}") from exc
