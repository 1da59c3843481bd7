"""Seeds of a task's requests: each its own, the same in every run."""

from __future__ import annotations

import hashlib


def own_seed(seed: int, *places: int) -> int:
    """A seed of 31 bits, by the cell's seed and where a request stands among the others."""
    digest = hashlib.sha256("/".join(map(str, (seed, *places))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
