"""A disk made slower: what a slower one would have done with the same work."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Lets at most `rate` bytes/s pass, over all threads; None is no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the disk would have done all that was asked of it

    def wait(self, nbytes: int) -> None:
        """Called after a transfer, which then has taken as long as on a disk of that rate; never less than it took."""
        if self._rate is None:
            return
        took = nbytes / self._rate
        with self._lock:
            # an idle disk does not save up: work begins when it is asked for, which was at most `took` ago
            self._free_at = max(self._free_at, time.perf_counter() - took) + took
            rest = self._free_at - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
