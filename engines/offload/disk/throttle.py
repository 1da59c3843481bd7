"""Imitates a slower disk: delays transfers to a given rate."""

import threading
import time


class Throttle:
    """Limits transfers of all threads together to `rate` bytes/s; None is no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the slower disk would have finished all transfers so far

    def wait(self, nbytes: int, began: float) -> None:
        """Sleeps, after a transfer that `began` then (`time.perf_counter`), until a disk of `rate` would have done it.

        Idle time earns no credit.
        """
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self._rate
            rest = self._free_at - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
