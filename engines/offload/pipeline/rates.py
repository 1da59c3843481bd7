"""What a rank tells of its machine before layers are divided: its clock, threads, memory, and if asked its rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engines.offload.backend.base import Backend, LoadRequest
from engines.offload.kernels import HostKernels
from engines.offload.memory.pass_time import PassRates
from engines.offload.memory.stage_times import RankRates, StageTimes
from engines.offload.memory.storage import storages
from engines.offload.pipeline.clocks import clock_name
from engines.offload.weights.pass_rates import ROWS, pass_rates, seconds_at
from harness.api import HardwareLimits
from harness.common.host_memory import own_limit, total_memory


@dataclass(frozen=True)
class Machine:
    """A rank's machine, before anything is measured. Ranks whose machines are equal are alike.

    clock: names the clock of its host, so the host. threads: that compute. memory: bytes that it may use.
    """

    clock: str
    threads: int
    memory: int

    @classmethod
    def here(cls) -> Machine:
        """This process's."""
        limit = own_limit()
        return cls(clock_name(), torch.get_num_threads(), min(total_memory(), limit or total_memory()))

    def under(self, request: LoadRequest) -> Machine:
        """What of it a load may use."""
        given = [count for count in (request.policy.threads, request.limits.threads) if count is not None]
        return replace(self, threads=min([*given, self.threads]))

    def limits(self, given: HardwareLimits) -> HardwareLimits:
        """The limits of a rank, with no more memory than it has."""
        budget = given.host_memory
        return given if budget is None else replace(given, host_memory=min(budget, self.memory))


@dataclass(frozen=True)
class MeasuredRates:
    """A rank's rates; see PassRates. `seconds`: rows of a product, and the seconds that a weight value takes in it."""

    seconds: tuple[tuple[int, float], ...]
    disk: float
    read_bytes: int
    memory: float
    write: float

    @property
    def pass_rates(self) -> PassRates:
        value_s = partial(seconds_at, dict(self.seconds))
        return PassRates(self.disk, self.read_bytes, value_s, self.memory, self.write)


def measured(request: LoadRequest, backend: Backend, kernels: HostKernels) -> MeasuredRates | None:
    """This rank's rates, as kept in its cache or measured now; None where its disk cannot be measured."""
    layers, outside, _ = storages(request.model.dtype, request.policy)
    way, hidden = backend.choose_gemms(layers, outside)[0][layers], request.model.shape.hidden
    rates = pass_rates(way, hidden, kernels, request.job.scratch, request.limits.disk_bandwidth)
    if rates is None:
        return None
    seconds = tuple((rows, rates.value_s(rows)) for rows in ROWS)
    return MeasuredRates(seconds, rates.disk, rates.read_bytes, rates.memory, rates.write)


def stage_times(request: LoadRequest, backend: Backend) -> StageTimes:
    """How to predict the stages of the model that is to be loaded."""
    layers, outside, cached = storages(request.model.dtype, request.policy)
    gemms, job = backend.choose_gemms(layers, outside)[0], request.job
    return StageTimes(
        request.model.shape, request.policy, gemms[layers].stored, gemms[outside].stored, cached, gemms[layers].dtype,
        job.max_sequence, job.mean_sequence, request.mean_new,
    )  # fmt: skip


def rank_rates(machines: Sequence[Machine], by_rank: Sequence[MeasuredRates], request: LoadRequest) -> list[RankRates]:
    """Of ranks by their number, what their stages' times are predicted from."""
    return [
        RankRates(rates.pass_rates, machine.under(request).threads, machine.limits(request.limits).host_memory)
        for machine, rates in zip(machines, by_rank, strict=True)
    ]
