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

    def wait(self, nbytes: int, began: float) -> None:
        """Called after a transfer that `began` at that time (`time.perf_counter`).

        It then has taken as long as on a disk of that rate which was asked for it at that time; never less than it
        took. An idle disk does not save up.
        """
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self._rate
            rest = self._free_at - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
