"""What a policy will do on a machine: throughput, latency, the resource that limits it, and the memory it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engines.planning.closed_form import RESOURCES, Layers, Pass, Seconds, averaged, pass_seconds
from engines.planning.engine_cost_models import ENGINE_COST_MODELS, EngineCostModel, realised_weights
from engines.planning.machine import Machine
from engines.planning.memory import Peak, capacity, peak, rows
from engines.planning.placement import best_fractions
from engines.planning.workload import Fractions, Lengths, cache_bytes, sublayers, weight_bytes
from harness.api import Bound, EngineTrace, HardwareProfile, HarnessError, ModelShape, OffloadPolicy


@dataclass(frozen=True)
class Prediction:
    """Of one block of sequences, from its first token to its last; of a sweep, of a block's worth in its steady state;
    of a job that was run in virtual time, of all its sequences. `requests`: how many these are; `together`: how many of
    them run at a time.

    `prefill_s` and `decode_s` add up to all that time; a sweep has no phases, and its `decode_s` is all.
    `used`: seconds that each resource works. `bound`: what the machine's arithmetic, and its disk for what memory
    cannot hold, allow whatever the policy. `trace`: of what was run in virtual time, as the engine's own.
    """

    requests: int
    together: int
    throughput_tok_s: float
    prefill_s: float
    decode_s: float
    block_latency_s: float
    bottleneck: str
    bound: Bound
    peak: Peak
    used: Mapping[str, float]
    trace: EngineTrace | None = None

    @property
    def busy(self) -> Mapping[str, float]:
        """Of each resource the part of the time in which it works."""
        return {name: seconds / (self.prefill_s + self.decode_s) for name, seconds in self.used.items()}

    @property
    def fraction_of_roofline(self) -> float:
        """Of what the machine allows."""
        return self.throughput_tok_s / self.bound.throughput_tok_s


class ClosedFormPlanner:
    """Predictions for one model, job, machine and engine."""

    def __init__(self, shape: ModelShape, lengths: Lengths, profile: HardwareProfile, engine: str) -> None:
        self.shape = shape
        self.lengths = lengths
        self.profile = profile
        self.style = ENGINE_COST_MODELS[engine]
        self.machine = Machine(profile)
        self._parts = sublayers(shape)

    def predict(self, policy: OffloadPolicy, page_cache: bool = True) -> Prediction:
        """Of a policy that names all fractions, whether it fits or not. `page_cache`: whether there is one.

        Raises HarnessError for what there is no model of.
        """
        require_modelled(policy)
        style = self._style_for(policy)
        assert policy.cache is not None
        assert policy.activations is not None
        placed = realised_weights(self.shape, policy, style)
        needs = peak(rows(self.shape, policy, self.lengths), placed, policy.cache, policy.activations)
        layers = Layers(self.shape, policy, self.machine, style, self._read(needs, page_cache))
        separate = self._separate(policy)

        def spent(works: Sequence[Pass]) -> tuple[float, Seconds]:
            return pass_seconds(layers, self._parts, works, policy.num_gpu_batches, style, separate)

        prompt, steps = self.lengths.prompt, self.lengths.generated
        batch = policy.gpu_batch_size
        if policy.schedule == "sweep":
            chunk = Pass(batch * prompt / steps, prompt / 2, batch / steps, True)
            seconds, used = spent([Pass(batch, prompt + steps / 2, batch, False), chunk])
            prefill, decode, used = 0.0, seconds * steps, used * steps
        else:
            prefill, first = spent([Pass(batch * prompt, prompt / 2, batch, True)])
            step = averaged(lambda c: spent([Pass(batch, c, batch, False)])[0], prompt, prompt + steps - 1)
            _, middle = spent([Pass(batch, prompt + steps / 2, batch, False)])
            decode, used = step * (steps - 1), first + middle * (steps - 1)
        tokens = policy.block_size * steps
        by_resource = dict(zip(RESOURCES, used.values, strict=True))
        return Prediction(
            requests=policy.block_size,
            together=policy.block_size,
            throughput_tok_s=tokens / (prefill + decode),
            prefill_s=prefill,
            decode_s=decode,
            block_latency_s=prefill + decode,
            bottleneck=max(by_resource, key=lambda name: by_resource[name]),
            bound=bound(self.shape, self.lengths, policy, self.machine, policy.block_size),
            peak=needs,
            used=by_resource,
        )

    #: The closed form is both: there is no schedule of the engine's for devices to run in virtual time yet.
    estimate = predict

    def placed(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the best fractions where it names none; where none fit, with all on disk."""
        if policy.weights and policy.cache and policy.activations:
            return policy
        low = (0.0, 0.0, 1.0)
        lowest = replace(
            policy, weights=policy.weights or low, cache=policy.cache or low, activations=policy.activations or low
        )
        return self.runnable(policy) or self._best(policy) or lowest

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with its best fractions, as the engine can realise them, if there are any that fit."""
        found = self._best(policy)
        fitting = (p for p in (_downwards(found) if found else ()) if not self.lacking(self.predict(p)))
        return next(fitting, None)

    def lacking(self, prediction: Prediction) -> Mapping[str, float]:
        """Bytes that each tier is short of for it."""
        return prediction.peak.lacking(capacity(self.profile))

    def _best(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        style, separate = self._style_for(policy), self._separate(policy)
        return best_fractions(self.shape, policy, self.lengths, self.machine, style, separate)

    def _style_for(self, policy: OffloadPolicy) -> EngineCostModel:
        return self.style if policy.overlap else replace(self.style, overlap="turns")

    def _separate(self, policy: OffloadPolicy) -> bool:
        """Whether there is another batch to multiply for while the host attends."""
        several = policy.num_gpu_batches > 1 or (policy.nano_batches > 1 and policy.nano_overlap)
        return several and self.style.parallel_attention and self.machine.has_device

    def _read(self, needs: Peak, page_cache: bool) -> float:
        """Bytes/s at which what is on disk comes: the memory's, where the page cache holds all of it."""
        disk, host = self.profile.disk, self.profile.host
        if self.style.direct:
            return disk.read
        if not page_cache:
            return disk.read * self.style.uncached_share
        return host.bandwidth if 0 < needs.disk < host.memory - needs.host else disk.read


def require_modelled(policy: OffloadPolicy) -> None:
    """Raises HarnessError for what there is no model of: attention to few values is faster or slower by the host."""
    if policy.value_sparsity < 1:
        raise HarnessError(f"policy.value_sparsity {policy.value_sparsity}: there is no performance model of it; "
                           "measure it with `harness run`")  # fmt: skip


def bound(shape: ModelShape, lengths: Lengths, policy: OffloadPolicy, machine: Machine, block: int) -> Bound:
    """Of a block: all its arithmetic at the best rate there is, and the disk for what is left of weights and cache when
    all memory is full of them, once a pass."""
    prompt, steps = lengths.prompt, lengths.generated
    compute_s = sum(shape.block_flops(block, prompt, steps)) / max(machine.dense.flops.values())
    room = capacity(machine.profile)
    weights = sum(weight_bytes(part, policy) * part.count for part in sublayers(shape))
    cache = block * (prompt + steps / 2) * cache_bytes(shape, policy) * shape.num_layers
    disk_s = steps * max(0.0, weights + cache - room.device - room.host) / machine.profile.disk.read
    throughput = block * steps / max(compute_s, disk_s)
    return Bound(throughput, compute_s, disk_s, "compute" if compute_s >= disk_s else "disk")


def _downwards(policy: OffloadPolicy) -> Iterator[OffloadPolicy]:
    """The policy, and those with a few percents of weights or cache a tier lower: what rounding may take."""
    assert policy.weights is not None
    assert policy.cache is not None
    yield policy
    for part in (0.01, 0.02, 0.04):
        for weights in _lower(policy.weights, part):
            yield replace(policy, weights=weights)
        for cache in _lower(policy.cache, part):
            yield replace(policy, cache=cache)


def _lower(fractions: Fractions, part: float) -> Iterator[Fractions]:
    device, host, disk = fractions
    moved = min(host, part)
    yield device, host - moved, disk + moved
    moved = min(device, part)
    yield device - moved, host + moved, disk
