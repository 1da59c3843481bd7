"""Shares memory between weights, keys and values by the seconds that each byte saves: FlexGen's linear programme.

The programme (Sheng et al. 2023, section 4.3): bytes of each kind on each tier, so that a job's passes, each as long as
its slowest resource, take as little time as possible within the memory of the tiers. Its structure gives the optimum
without a solver. Given how much of the cache is on the device and in host memory, the weights that a pass reads most
often fill the rest of both: any other choice would copy more to the device, or read more from disk, and gain nothing
elsewhere. Two numbers are left, and the time is convex in them, as the value of a linear programme is in its limits. So
each is found by bisection. tests/unit/test_shared_memory.py holds this against HiGHS.

Activations between layers stay on the first tier: elsewhere they cost time and free nothing there, as the rows of all
batches meet again in the next product (model/activation_offload.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as cached

from engines.offload.memory.pass_time import Traffic
from engines.offload.memory.plan import WeightClass, largest

#: What is on the device is sought in so many steps at most, and what is in host memory in steps so much finer: the time
#: that the second search finds must tell apart the steps of the first.
_STEPS, _FINER = 256, 16
#: Times that differ by less than this share of them are equal: then more is in the upper tier.
_EQUAL = 1e-9


@dataclass(frozen=True)
class TierBudgets:
    """Bytes for weights and KV blocks in device memory and in host memory.

    Where blocks are below the device, up to `staged` of them have a buffer there too, of `staging_bytes` bytes each;
    where some are on disk, up to `staged` have one in host memory, of `host_staging_bytes` each. Without a device
    `device` is 0. `on_disk`: blocks that the disk has room for.
    """

    device: float
    host: float
    staged: int = 0
    staging_bytes: float = 0.0
    host_staging_bytes: float = 0.0
    on_disk: float = math.inf


@dataclass(frozen=True)
class Shares:
    """What each tier holds: KV blocks on device, in host memory and on disk; what a pass moves; the job's seconds."""

    blocks: tuple[int, int, int]
    traffic: Traffic
    seconds: float


@dataclass(frozen=True)
class PlacementProgram:
    """The programme for `blocks` KV blocks of `block_bytes` bytes and `weights`, most likely ones first, in `budgets`.

    job_seconds: of what passes move; convex, and never less for more, nor for blocks on disk than in host memory.
    held: bytes of weights that a policy sets for device and host; None where it sets none.
    """

    weights: Sequence[WeightClass]
    blocks: int
    block_bytes: float
    budgets: TierBudgets
    job_seconds: Callable[[Traffic], float]
    held: tuple[float, float] | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a placement."""
        on_device = self._most_on_device
        return on_device >= 0 and self._least_in_host(on_device) <= self._most_in_host(on_device)

    def best(self) -> Shares:
        """The placement of the least time; of equal ones that with more of the cache on the device, then in host
        memory. There must be one."""
        on_device, most = cached(self._with_on_device), self._most_on_device
        step = max(1, self.blocks // _STEPS)
        bent = _convex_minimum(range(0, most + 1, step), lambda n: on_device(n).seconds)
        return min(on_device(most), on_device(bent), key=lambda shares: shares.seconds)

    @property
    def _most_on_device(self) -> int:
        """The most blocks that the device holds beside the stages of the others; -1 if it does not hold these."""
        budget = self.budgets.device - (self.held[0] if self.held else 0.0)
        return _most(self.blocks, self.block_bytes, self.budgets.staged, self.budgets.staging_bytes, budget)

    def _most_in_host(self, on_device: int) -> int:
        """The most of the other blocks that host memory holds beside the stages of those on disk; -1 as above."""
        budgets = self.budgets
        budget = budgets.host - (self.held[1] if self.held else 0.0)
        return _most(self.blocks - on_device, self.block_bytes, budgets.staged, budgets.host_staging_bytes, budget)

    def _least_in_host(self, on_device: int) -> int:
        """The other blocks that the disk has no room for."""
        on_disk = self.budgets.on_disk
        return max(0, math.ceil(self.blocks - on_device - on_disk)) if on_disk < self.blocks else 0

    def _with_on_device(self, on_device: int) -> Shares:
        """The best with so many blocks on the device."""
        least, most = self._least_in_host(on_device), self._most_in_host(on_device)
        if least > most:
            return Shares((on_device, 0, self.blocks - on_device), Traffic(math.inf), math.inf)
        in_host = cached(lambda n: self._placed(on_device, n))
        first = in_host(most)
        below = self.blocks - on_device
        idle = Traffic(0.0, first.traffic.copied, (on_device / self.blocks, below / self.blocks, 0.0))
        if first.seconds <= self.job_seconds(idle) * (1 + _EQUAL):
            return first  # nothing waits for the disk
        step = max(1, self.blocks // (_STEPS * _FINER))
        best = _convex_minimum(range(least, most + 1, step), lambda n: in_host(n).seconds)
        return min(first, in_host(best), key=lambda shares: shares.seconds)

    def _placed(self, on_device: int, in_host: int) -> Shares:
        """With weights in what such a division of the cache leaves."""
        budgets, below = self.budgets, self.blocks - on_device
        on_disk = below - in_host
        if self.held is None:
            device = budgets.device - on_device * self.block_bytes - min(below, budgets.staged) * budgets.staging_bytes
            host = budgets.host - in_host * self.block_bytes - min(on_disk, budgets.staged) * budgets.host_staging_bytes
        else:
            device, host = self.held
        fractions = (on_device / self.blocks, in_host / self.blocks, on_disk / self.blocks)
        device = max(0.0, device)
        copied, streamed = (_expected(self.weights, held) for held in (device, device + max(0.0, host)))
        traffic = Traffic(streamed, copied, fractions)
        return Shares((on_device, in_host, on_disk), traffic, self.job_seconds(traffic))


def _most(blocks: int, block_bytes: float, staged: int, staging_bytes: float, budget: float) -> int:
    """The most of so many blocks that a tier holds if up to `staged` of the others are staged there, else -1."""
    if blocks * block_bytes <= budget:
        return blocks

    def fits(held: int) -> bool:
        return held * block_bytes + min(blocks - held, staged) * staging_bytes <= budget

    return largest(blocks, lambda n: fits(n - 1)) - 1


def _expected(weights: Sequence[WeightClass], held: float) -> float:
    """Bytes that a pass is expected to need of weights beyond the first `held` bytes of them."""
    expected = 0.0
    for one in weights:
        expected += one.probability * max(0.0, one.nbytes - max(0.0, held))
        held -= one.nbytes
    return expected


def _convex_minimum(among: range, value: Callable[[int], float]) -> int:
    """The last of some numbers at which a convex function is least."""

    def falls(n: int) -> bool:
        return value(among[n]) <= value(among[n - 1]) * (1 + _EQUAL)

    return among[largest(len(among) - 1, falls)]
