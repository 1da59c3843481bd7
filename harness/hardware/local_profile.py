"""The profile of this host for a run, measured at most once if there is none."""

from collections.abc import Callable
from pathlib import Path

from harness import hardware
from harness.api import HardwareProfile, HarnessError


class LocalProfile:
    """The profile that `harness calibrate` left in `cache`, or that the run measures."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._profile: HardwareProfile | HarnessError | None = None

    def get(self, measure: Callable[[], None]) -> HardwareProfile:
        """The profile; `measure` must leave one in the cache. A HarnessError is raised again at every later call."""
        if self._profile is None:
            try:
                if hardware.is_unknown(self._cache):
                    measure()
                self._profile = hardware.load("local", self._cache)
            except HarnessError as exc:
                self._profile = exc
        if isinstance(self._profile, HarnessError):
            raise self._profile
        return self._profile
