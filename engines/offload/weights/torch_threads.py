"""How many threads torch's own operations get beside the pool that multiplies.

A pass alternates products, on the pool, with norms and activations, on torch's threads. Where those sleep in between
(OMP_WAIT_POLICY=PASSIVE), to wake them can take longer than such an operation; where they spin, they take the pool's
CPUs.
"""

import os
import statistics
import time
from collections.abc import Sequence

import torch
from torch.nn.functional import layer_norm, silu

from engines.offload.kernels.tile_pool import TilePool
from engines.offload.weights.kept_choices import KeptChoices
from harness.api import Dtype

_ROUNDS = 15
#: A product takes longer: after it torch's threads sleep.
_PRODUCT_S = 0.001
#: All of torch's threads are taken where they need less than this part of one thread's time.
_CLEARLY_FASTER = 0.8


def most_torch_threads(pool: TilePool | None) -> int:
    """Threads that torch may have beside `pool`: one, where idle ones would spin on the pool's CPUs."""
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    return 1 if pool is not None and spins else torch.get_num_threads()


def choose_torch_threads(
    pools: Sequence[TilePool | None], rows: int, hidden: int, dtype: Dtype, choices: KeptChoices
) -> int:
    """One thread or as many as torch may have: which is faster for operations on [rows, hidden] after a product, as
    kept in the cache, or measured and kept. Where nothing is multiplied by a pool, as many as it may have."""
    most = min(most_torch_threads(pool) for pool in pools)
    if most == 1 or not any(pools):
        return most
    rows = 1 << (rows - 1).bit_length()  # loads that differ little choose alike
    among = ("torch's threads beside the pool", most, rows, hidden, dtype)
    if (kept := choices.get(*among)) is not None and kept in ("1", str(most)):
        return int(kept)
    one, together = _seconds((1, most), rows, hidden, getattr(torch, dtype))
    chosen = most if together < _CLEARLY_FASTER * one else 1
    choices.keep(str(chosen), *among)
    return chosen


@torch.inference_mode()
def _seconds(counts: Sequence[int], rows: int, hidden: int, dtype: torch.dtype) -> list[float]:
    """Seconds of some operations by how many threads torch has, tried in turns; it has as many as before afterwards."""
    x = torch.full((rows, hidden), 0.01, dtype=dtype)
    weight = torch.ones(hidden, dtype=dtype)
    before = torch.get_num_threads()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(_ROUNDS):
            for count, taken in seconds.items():
                torch.set_num_threads(count)
                time.sleep(_PRODUCT_S)
                began = time.perf_counter()
                silu(layer_norm(x + x, (hidden,), weight, weight))
                taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return [statistics.median(taken) for taken in seconds.values()]
