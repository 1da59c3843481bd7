"""Derives a reproducible seed for each request of a task."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, *indices: int) -> int:
    """A seed of 31 bits, from the cell's seed and the request's indices (example, answer)."""
    digest = hashlib.sha256("/".join(map(str, (seed, *indices))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
