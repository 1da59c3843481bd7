"""Predicts by the closed form what a policy does on a machine: throughput, latency, bottleneck and memory."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engines.offload.memory.device import PINNED_SHARE
from engines.planning.closed_form import (
    RESOURCES,
    BatchWork,
    Seconds,
    SublayerCosts,
    decode_work,
    mean_over,
    mixed_work,
    prefill_work,
)
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.flexgen_memory import flexgen_constraints
from engines.planning.machine import Machine
from engines.planning.memory import MemoryConstraint, TierBytes, capacity, memory_constraints, peak_memory
from engines.planning.placement import Programme, linear_programme
from engines.planning.planned_job import PlannedJob
from engines.planning.rounding import placements
from engines.planning.thread_control import best_threads, concurrent_operators, relative_time, with_attention_time
from engines.planning.virtual_pipeline import PipelineUse
from engines.planning.workload import (
    VALUE_BYTES,
    FloatArray,
    Fractions,
    kv_bytes,
    model_weight_bytes,
    pinned_bytes,
    sublayers,
)
from harness.api import Bound, EngineTrace, HardwareProfile, HarnessError, ModelShape, OffloadPolicy
from harness.common.roofline import block_bound, least_bytes

#: Batch sizes that are tried, a fifth to a half apart.
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024,
               1536, 2048)  # fmt: skip
#: Placements that are predicted, of those that the linear programme's costs rank first.
_PREDICTED = 3
_ALL_ON_DISK: Fractions = (0.0, 0.0, 1.0)
#: How long a pass takes in which each batch does some works, and how long each resource is busy in it.
PassModel = Callable[[SublayerCosts, Sequence[BatchWork]], tuple[float, Seconds]]


@dataclass(frozen=True)
class Prediction:
    """The prediction for `requests` requests, of which `together` run at a time.

    In closed form these are one block of sequences, from its first token to its last, or a block's worth of a sweep's
    steady state; in virtual time, all of the job.

    prefill_s, decode_s: add up to all of the time; a sweep has no phases and counts as decode.
    used: busy seconds of each resource.
    bound: what the machine's arithmetic and disk allow under any policy; see `bound`.
    peak: bytes needed on each tier.
    trace: of a simulated run, as the engine's own.
    pipeline: what each of several stages did; `used` and `peak` are those of the longest one then.
    """

    requests: int
    together: int
    throughput_tok_s: float
    prefill_s: float
    decode_s: float
    block_latency_s: float
    bottleneck: str
    bound: Bound
    peak: TierBytes
    used: Mapping[str, float]
    trace: EngineTrace | None = None
    pipeline: PipelineUse | None = None

    @property
    def busy(self) -> Mapping[str, float]:
        """Share of the time in which each resource works."""
        return {name: seconds / (self.prefill_s + self.decode_s) for name, seconds in self.used.items()}

    @property
    def fraction_of_roofline(self) -> float:
        """Share of what the machine allows."""
        return self.throughput_tok_s / self.bound.throughput_tok_s


@dataclass(frozen=True)
class Phases:
    """Seconds of a block of sequences: of its prompts, and of all of its other passes; and of each resource in all."""

    prefill_s: float
    decode_s: float
    used: Seconds


class ClosedFormPlanner:
    """Predictions for one job, machine and engine."""

    #: The batch sizes that a search tries.
    batch_sizes: Sequence[int] = BATCH_SIZES

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel) -> None:
        self.job = job
        self.shape = job.shape
        self.lengths = job.lengths
        self.profile = profile
        self.engine = engine
        self.machine = Machine(profile)
        self._on_threads: dict[int | None, Machine] = {}

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """For a policy with all fractions, whether it fits or not; planners that run passes in virtual time do so here.

        Raises HarnessError for a policy without a performance model.
        """
        return self.estimate(policy)

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """As predict by the closed form, which is fast: it ranks policies."""
        return self._predicted(policy, SublayerCosts.pass_seconds)

    def _predicted(self, policy: OffloadPolicy, model: PassModel) -> Prediction:
        """As predict, by a model of passes."""
        require_modelled(policy)
        engine, peak = self._working(policy)
        phases = self._phases(self.shape, policy, engine, peak, model)
        return self._prediction(policy, phases, peak)

    def peak(self, policy: OffloadPolicy) -> TierBytes:
        """Bytes that a policy with all fractions needs of each tier."""
        assert policy.cache and policy.activations
        weights = self.engine.placed_weights(self.shape, policy)
        return peak_memory(self._constraints(policy), weights, policy.cache, policy.activations)

    def _working(self, policy: OffloadPolicy) -> tuple[EngineCostModel, TierBytes]:
        """The engine as it works under a policy with all fractions, and the memory that it needs."""
        engine, peak = self._engine_for(policy), self.peak(policy)
        return replace(
            engine, pinned_weights=self._pinned(policy, engine.placed_weights(self.shape, policy), peak)
        ), peak

    def _phases(
        self, shape: ModelShape, policy: OffloadPolicy, engine: EngineCostModel, peak: TierBytes, model: PassModel
    ) -> Phases:
        """How long a block of sequences takes by a model of passes; `shape`: of the layers that it passes."""
        cost = partial(model, SublayerCosts(shape, policy, self._machine_for(policy), engine, self._disk_read(peak)))
        prompt, steps = self.lengths.prompt, self.lengths.generated
        batch = policy.gpu_batch_size
        if policy.schedule == "sweep":
            seconds, used = cost(mixed_work(batch, self.lengths))
            return Phases(0.0, seconds * steps, used * steps)
        prefill, first = cost([prefill_work(batch, self.lengths)])

        def step(context: float) -> Seconds:
            seconds, used = cost([decode_work(batch, context)])
            return np.array([seconds, *used])

        decode = (steps - 1) * mean_over(step, prompt, prompt + steps - 1)
        return Phases(prefill, float(decode[0]), first + decode[1:])

    def _prediction(self, policy: OffloadPolicy, phases: Phases, peak: TierBytes) -> Prediction:
        by_resource = dict(zip(RESOURCES, phases.used.tolist(), strict=True))
        seconds = phases.prefill_s + phases.decode_s
        return Prediction(
            requests=policy.block_size,
            together=policy.block_size,
            throughput_tok_s=policy.block_size * self.lengths.generated / seconds,
            prefill_s=phases.prefill_s,
            decode_s=phases.decode_s,
            block_latency_s=seconds,
            bottleneck=max(by_resource, key=lambda name: by_resource[name]),
            bound=bound(self.job, policy, self.machine, policy.block_size),
            peak=peak,
            used=by_resource,
        )

    def with_fractions(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the best fractions where it sets none; with all of it on disk if none fit."""
        if policy.weights and policy.cache and policy.activations:
            return policy
        on_disk = replace(
            policy,
            weights=policy.weights or _ALL_ON_DISK,
            cache=policy.cache or _ALL_ON_DISK,
            activations=policy.activations or _ALL_ON_DISK,
        )
        return self.runnable(policy) or self._programme(policy).best(policy) or on_disk

    @property
    def divides_experts(self) -> bool:
        """Whether the engine can have the host multiply experts beside a device."""
        return False

    def read_share(self, policy: OffloadPolicy, rows: int) -> float | None:
        """The part of a mixture's experts, in bytes, that a pass of `rows` rows is expected to need; None where every
        pass is taken to need all."""
        return None

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with its best fractions as the engine realises them; None if none fit."""
        constraints, programme = self._constraints(policy), self._programme(policy)
        best = programme.best(policy)
        candidates: list[OffloadPolicy] = []
        if best is None:
            return None
        room = capacity(self.profile)
        for fitting in placements(policy, best, self.shape, self.engine, constraints, room):
            if not fitting:
                continue
            seconds, pinned = self._ranking(programme, fitting)
            fastest: list[int] = np.argsort(seconds, kind="stable")[:_PREDICTED].tolist()
            candidates += [fitting[i] for i in fastest]
            if pinned[fastest[0]]:  # elsewhere there may be a placement that can be pinned
                break
        return max(candidates, key=lambda p: self.estimate(p).throughput_tok_s, default=None)

    def _pinned(self, policy: OffloadPolicy, weights: Fractions, peak: TierBytes) -> bool:
        """Whether weights are copied from pinned memory: on request, which users make where there is room for it.

        Weights are pinned before anything else is allocated; as for our engine, no more than a share of the host is.
        """
        if not self.engine.pins_copies:
            return self.engine.pinned_weights
        host = self.profile.host.memory
        pinned = weights[1] * sum(part.count * pinned_bytes(part, policy) for part in sublayers(self.shape))
        others = peak.host - weights[1] * model_weight_bytes(self.shape, policy)
        return pinned <= PINNED_SHARE * host and pinned + others <= host

    def _ranking(self, programme: Programme, policies: Sequence[OffloadPolicy]) -> tuple[FloatArray, Sequence[bool]]:
        """Seconds of policies that differ in their fractions, by the programme's costs; and whether weights are pinned.

        Costs do not depend on that linearly: what is not pinned is taken to be copied before it is loaded.
        """
        constraints = self._constraints(policies[0])
        fractions, pinned = [], []
        for policy in policies:
            assert policy.cache and policy.activations
            weights = self.engine.placed_weights(self.shape, policy)
            fractions.append((*weights, *policy.cache, *policy.activations))
            peak = peak_memory(constraints, weights, policy.cache, policy.activations)
            pinned.append(self._pinned(policy, weights, peak) or not self.engine.pins_copies)
        placed = np.array(fractions)
        link = self._machine_for(policies[0]).link
        unpinned_s = self.lengths.generated * model_weight_bytes(self.shape, policies[0]) / link.h2d_pageable
        return programme.seconds(placed) + np.where(pinned, 0.0, placed[:, 1] * unpinned_s), pinned

    def missing(self, prediction: Prediction) -> Mapping[str, float]:
        """Bytes that each tier is short of."""
        return prediction.peak.missing(capacity(self.profile))

    def with_thread_control(self, control: bool) -> "ClosedFormPlanner":
        """The same planner for an engine that allots threads itself, or takes a library's default."""
        planner = copy(self)
        planner.engine, planner._on_threads = replace(self.engine, thread_control=control), {}
        return planner

    def _machine_for(self, policy: OffloadPolicy) -> Machine:
        """The machine whose host attends on the policy's threads, beside a device; else on those the engine allots."""
        given = policy.threads is not None or self.engine.thread_control
        if not (given and policy.cpu_attention and self.machine.has_device):
            return self.machine
        if policy.threads not in self._on_threads:
            host, degree = self.profile.host, concurrent_operators(self.engine)
            choice = (degree, policy.threads) if policy.threads else best_threads(host, degree)
            time = relative_time(host, degree, *choice)
            self._on_threads[policy.threads] = Machine(with_attention_time(self.profile, time))
        return self._on_threads[policy.threads]

    def _constraints(self, policy: OffloadPolicy) -> Sequence[MemoryConstraint]:
        """What must fit, for the policy's batches and bits and any fractions."""
        constraints = flexgen_constraints if self.engine.whole_tensors else memory_constraints
        return constraints(self.shape, policy, self.lengths)

    def _programme(self, policy: OffloadPolicy) -> Programme:
        engine = self._engine_for(policy)
        return linear_programme(
            self.shape, policy, self.lengths, self._machine_for(policy), engine, self._constraints(policy)
        )

    def _engine_for(self, policy: OffloadPolicy) -> EngineCostModel:
        """The engine under a policy: while the host attends, the device needs another batch to multiply."""
        return replace(
            self.engine,
            overlap=self.engine.overlap if policy.overlap else "none",
            parallel_attention=self.engine.parallel_attention and policy.has_batch_beside and self.machine.has_device,
        )

    def _disk_read(self, peak: TierBytes) -> float:
        """Bytes/s at which files arrive: at the memory's rate if the page cache holds all of them."""
        host = self.profile.host
        cached = not self.engine.direct_io and 0 < peak.disk < host.memory - peak.host
        return host.bandwidth if cached else self.profile.disk.read


def require_modelled(policy: OffloadPolicy) -> None:
    """Raises HarnessError for sparse attention, whose gain depends on the host, for int8 arithmetic, whose rates no
    profile has, and for ranks that hold a part of every matrix."""
    unknown = {"value_sparsity": policy.value_sparsity < 1, "compute_dtype": policy.compute_dtype == "int8",
               "tensor": policy.tensor > 1}  # fmt: skip
    for name in (name for name, is_unknown in unknown.items() if is_unknown):
        raise HarnessError(f"policy.{name} {getattr(policy, name)}: there is no performance model of it; "
                           "measure it with `harness run`")  # fmt: skip


def bound(job: PlannedJob, policy: OffloadPolicy, machine: Machine, block: int) -> Bound:
    """The roofline of a block of sequences under any policy with these bits.

    All arithmetic runs at the profile's best rate. Each pass reads from disk what all memory cannot hold of weights,
    bfloat16 in the twelve bits that hold it, and of the cache, which the first pass does not need.
    """
    shape, lengths = job.shape, job.lengths
    steps = lengths.generated
    compute_s = sum(shape.block_flops(block, lengths.prompt, steps)) / max(machine.dense.flops.values())
    room = capacity(machine.profile)
    cache = block * lengths.mean_cached * kv_bytes(shape, policy) * shape.num_layers * (steps - 1) / steps
    idle = shape.params_idle * policy.value_bytes(policy.weight_bits, VALUE_BYTES)  # experts that nobody may ask for
    weights = model_weight_bytes(shape, policy) - idle
    if policy.weight_bits == 16 and job.dtype == "bfloat16":
        weights *= least_bytes(job.dtype, policy) / VALUE_BYTES
    on_disk = max(0.0, weights + cache - room.device - room.host)
    return block_bound(block * steps, compute_s, steps * on_disk / machine.profile.disk.read)
