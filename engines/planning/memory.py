"""The memory that a policy needs on each tier, as constraints that are linear in its fractions.

Source: FlexGen (Sheng et al. 2023), appendix A.3: what stays in each tier, and the working set of prefill or decode,
whichever is larger. In decode activations are those of one token, where the paper keeps the prompt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.planning.workload import (
    VALUE_BYTES,
    Fractions,
    Lengths,
    kv_bytes,
    model_weight_bytes,
    sublayers,
    weight_bytes,
)
from harness.api import HardwareProfile, ModelShape, OffloadPolicy

TIERS = ("device", "host", "disk")
#: Share of a device beside CUDA's context that torch's tensors fill: it rounds sizes, and frees leave gaps.
ALLOCATED_SHARE = 0.96


@dataclass(frozen=True)
class TierBytes:
    """Bytes of each tier."""

    device: float
    host: float
    disk: float

    def missing(self, available: TierBytes) -> Mapping[str, float]:
        """By tier the bytes by which this exceeds what is available, where it does."""
        pairs = ((tier, getattr(self, tier) - getattr(available, tier)) for tier in TIERS)
        return {tier: short for tier, short in pairs if short > 0}


@dataclass(frozen=True)
class MemoryConstraint:
    """Bytes that a tier must have: a constant, plus coefficients for each kind's device, host and disk fractions."""

    tier: str
    constant: float
    weights: Fractions
    cache: Fractions
    activations: Fractions

    def needed(self, weights: Fractions, cache: Fractions, activations: Fractions) -> float:
        """Bytes for a placement."""
        kinds = ((self.weights, weights), (self.cache, cache), (self.activations, activations))
        return self.constant + sum(a * b for row, part in kinds for a, b in zip(row, part, strict=True))


def capacity(profile: HardwareProfile) -> TierBytes:
    """Bytes that each tier of a machine holds."""
    device = profile.device.memory if profile.device else 0.0
    return TierBytes(device, profile.host.memory, profile.disk.capacity)


def memory_constraints(shape: ModelShape, policy: OffloadPolicy, lengths: Lengths) -> list[MemoryConstraint]:
    """The constraints of a machine with a device for the policy's batches and bits, whatever its fractions."""
    batch, block, hidden = policy.gpu_batch_size, policy.block_size, shape.hidden
    weights = model_weight_bytes(shape, policy)
    layer = sum(weight_bytes(part, policy) for part in sublayers(shape) if not part.is_head)
    sweep = policy.schedule == "sweep"
    # sequences of mixed ages hold their mean length on average
    held = lengths.mean_cached if sweep else lengths.max_cached
    layer_cache = block * held * kv_bytes(shape, policy)
    cache = layer_cache * shape.num_layers
    # a sweep's pass has one token of each sequence, and prompts at the rate at which sequences end
    first = 1 + lengths.prompt / lengths.generated if sweep else lengths.prompt
    block_inputs = VALUE_BYTES * first * hidden * block
    prompts = VALUE_BYTES * first * hidden * batch
    constraints = []
    for new, seen in ((first, lengths.prompt), (1, lengths.max_cached)):
        inputs = VALUE_BYTES * new * hidden * batch
        scores = batch * (4 * seen * hidden + 2 * shape.num_heads * new * seen)
        widest = max(4 * inputs, VALUE_BYTES * batch * new * (hidden + shape.ffn))
        # two layers' weights in flight, a batch's inputs, and the widest intermediate of a layer
        for constant, attended in ((widest, 0.0), (0.0, scores)):
            constraints.append(
                MemoryConstraint("device", constant, (weights, 2 * layer, 2 * layer), (cache + attended, 0.0, 0.0),
                                 (block_inputs, inputs, inputs))
            )  # fmt: skip
    # in flight through host memory: a layer's weights and a batch's inputs, or a layer's cache from disk
    staged = 2 * layer_cache / policy.num_gpu_batches
    return [
        *constraints,
        MemoryConstraint("host", 0.0, (0.0, weights + layer, layer), (0.0, cache, 0.0),
                         (0.0, block_inputs + prompts, prompts)),
        MemoryConstraint("host", 0.0, (0.0, weights, layer), (0.0, cache, staged), (0.0, block_inputs, 0.0)),
        MemoryConstraint("disk", 0.0, (0.0, 0.0, weights), (0.0, 0.0, cache), (0.0, 0.0, block_inputs)),
    ]  # fmt: skip


def peak_memory(
    constraints: Sequence[MemoryConstraint], weights: Fractions, cache: Fractions, activations: Fractions
) -> TierBytes:
    """The largest constraint of each tier, for a placement."""
    return TierBytes(**{
        tier: max(c.needed(weights, cache, activations) for c in constraints if c.tier == tier) for tier in TIERS
    })  # fmt: skip
