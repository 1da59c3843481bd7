"""The memory that a policy needs on each tier, as rows that are linear in its fractions.

Source: FlexGen (Sheng et al. 2023), appendix A.3: what stays at home, and the working set of the phase that needs
more; in the decoding phase activations are one token's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.planning.workload import VALUE_BYTES, Fractions, Lengths, cache_bytes, sublayers, weight_bytes
from harness.api import HardwareProfile, ModelShape, OffloadPolicy

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Peak:
    """Bytes of each tier."""

    device: float
    host: float
    disk: float

    def lacking(self, room: Peak) -> Mapping[str, float]:
        """Bytes that each tier is short of, of those that are."""
        pairs = ((tier, getattr(self, tier) - getattr(room, tier)) for tier in TIERS)
        return {tier: short for tier, short in pairs if short > 0}


@dataclass(frozen=True)
class Row:
    """Bytes that a tier must have: `constant`, and by device, host and disk for the fractions of each kind."""

    tier: str
    constant: float
    weights: Fractions
    cache: Fractions
    activations: Fractions

    def at(self, weights: Fractions, cache: Fractions, activations: Fractions) -> float:
        """Its value for a placement."""
        kinds = ((self.weights, weights), (self.cache, cache), (self.activations, activations))
        return self.constant + sum(a * b for row, part in kinds for a, b in zip(row, part, strict=True))


def capacity(profile: HardwareProfile) -> Peak:
    """What each tier of a machine holds."""
    device = profile.device.memory if profile.device else 0.0
    return Peak(device, profile.host.memory, profile.disk.capacity)


def rows(shape: ModelShape, policy: OffloadPolicy, lengths: Lengths) -> list[Row]:
    """What each tier must have, of a machine with a device, whatever the policy's fractions are."""
    batch, block, hidden = policy.gpu_batch_size, policy.block_size, shape.hidden
    pieces = sublayers(shape)
    weights = sum(weight_bytes(part, policy) * part.count for part in pieces)
    layer = sum(weight_bytes(part, policy) for part in pieces if not part.last)
    sweep = policy.schedule == "sweep"
    # sequences of all ages hold as much as one of middle age each
    held = lengths.prompt + lengths.generated / 2 if sweep else lengths.longest
    of_layer = block * held * cache_bytes(shape, policy)
    cache = of_layer * shape.num_layers
    # a sweep's pass has a token of each sequence, and of prompts as many as keep their number
    first = 1 + lengths.prompt / lengths.generated if sweep else lengths.prompt
    kept = VALUE_BYTES * first * hidden * block
    prompts = VALUE_BYTES * first * hidden * batch
    found = []
    for new, seen in ((first, lengths.prompt), (1, lengths.longest)):
        inputs = VALUE_BYTES * new * hidden * batch
        scores = batch * (4 * seen * hidden + 2 * shape.num_heads * new * seen)
        largest = max(4 * inputs, VALUE_BYTES * batch * new * (hidden + shape.ffn))
        # two layers' weights that are not at home, a batch's inputs, and the most that a layer makes of them
        for constant, attended in ((largest, 0.0), (0.0, scores)):
            found.append(Row("device", constant, (weights, 2 * layer, 2 * layer), (cache + attended, 0.0, 0.0),
                             (kept, inputs, inputs)))  # fmt: skip
    # beside what is at home what is on its way: a layer's weights and a batch's inputs, or what comes from disk
    found.append(Row("host", 0.0, (0.0, weights + layer, layer), (0.0, cache, 0.0), (0.0, kept + prompts, prompts)))
    staged = 2 * of_layer / policy.num_gpu_batches
    found.append(Row("host", 0.0, (0.0, weights, layer), (0.0, cache, staged), (0.0, kept, 0.0)))
    found.append(Row("disk", 0.0, (0.0, 0.0, weights), (0.0, 0.0, cache), (0.0, 0.0, kept)))
    return found


def peak(needs: Sequence[Row], weights: Fractions, cache: Fractions, activations: Fractions) -> Peak:
    """The largest of each tier's rows."""
    by_tier = {tier: max(row.at(weights, cache, activations) for row in needs if row.tier == tier) for tier in TIERS}
    return Peak(**by_tier)
