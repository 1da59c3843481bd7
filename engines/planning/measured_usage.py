"""How often a model's experts were used here, as far as the engine has counted it, in the terms of a plan."""

from collections.abc import Sequence
from pathlib import Path

from engines.offload.memory.expert_usage import MixtureCounts
from engines.offload.memory.layout import matrices_of
from engines.offload.weights.kept_usage import kept_for
from harness.api import ModelShape


def measured_usage(model: str, shape: ModelShape, cache: Path | None) -> tuple[str, Sequence[MixtureCounts]]:
    """The counts of each layer for a PlannedJob, and the checkpoint that they are of. None, of "", where nothing is
    counted or counts are not of a mixture in every layer."""
    kept = kept_for(model, cache) if cache is not None and shape.params_idle else None
    if kept is None:
        return "", ()
    name, counts = kept
    made_up = len({m.expert for m in matrices_of(shape) if m.expert is not None})
    if len(counts) != shape.num_layers or any(len(c.rows) % max(1, made_up) for c in counts):
        return "", ()
    return name, [_bundled(c, made_up) for c in counts]


def _bundled(counts: MixtureCounts, bundles: int) -> MixtureCounts:
    """The counts of as many experts as a plan makes up, each of which stands for several of similar use: a shape does
    not say how many a token uses."""
    size = len(counts.rows) // bundles
    ranked = sorted(zip(counts.rows, counts.used, strict=True), reverse=True)
    parts = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    rows, used = (tuple(round(sum(one[i] for one in part) / size) for part in parts) for i in (0, 1))
    return MixtureCounts(counts.tokens, counts.passes, rows, used)
