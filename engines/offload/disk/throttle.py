"""Slows a disk down to what a slower one would have done with the same work."""

from __future__ import annotations

import threading
import time


class Throttle:
    """At most `rate` bytes/s over all threads; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the slower disk would have finished all requests

    def wait(self, nbytes: int, began: float) -> None:
        """Call after a transfer that `began` then (`time.perf_counter`): sleeps until a disk of the given rate would
        have finished it. An idle disk saves nothing up."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self._rate
            rest = self._free_at - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
