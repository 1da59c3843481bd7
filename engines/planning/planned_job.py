"""The job that a planner plans: a model and its requests, and what they ask of the engine's memory planner."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engines.offload.memory.expert_usage import ExpertUsage, MixtureCounts
from engines.offload.memory.layout import Matrix, WeightTile, matrices_of
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Storage
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, Dtype, ModelShape
from harness.api.machine import mean_cached_length

#: Bytes of host memory that the operating system and idle processes take.
SYSTEM_BYTES = 1.5e9
#: Norms and biases of a layer, in multiples of the hidden size.
_SMALL = 16


@dataclass(frozen=True)
class PlannedJob:
    """A model and the requests that it answers.

    each: lengths of the requests, repeated as needed.
    requests: how many there are; None for the engine's own steady-state number.
    dtype: of the weights in the checkpoint.
    budget: bytes of host memory for the engine, pinned where there is a device; None for all that the system leaves.
    reserved: tokens that each sequence may grow to; None for the longest request.
    counts: how often the experts of each layer were used; empty to take their use to be uniform.
    """

    shape: ModelShape
    each: Sequence[Lengths]
    requests: int | None = None
    dtype: Dtype = "float16"
    budget: float | None = None
    reserved: int | None = None
    counts: Sequence[MixtureCounts] = ()

    @cached_property
    def lengths(self) -> Lengths:
        """The mean of both lengths, in whole tokens."""
        prompt = statistics.mean(r.prompt for r in self.each)
        generated = statistics.mean(r.generated for r in self.each)
        return Lengths(max(1, round(prompt)), max(1, round(generated)))

    @property
    def max_sequence(self) -> int:
        """Tokens that a sequence may have."""
        return self.reserved or max(r.prompt + r.generated for r in self.each)

    @cached_property
    def usage(self) -> ExpertUsage:
        """How often a pass needs the experts that layout.matrices_of makes up."""
        matrices = planned_matrices(self.shape)
        mixtures = list(dict.fromkeys(m.mixture for m in matrices if m.expert is not None))
        counts = dict(zip(mixtures, self.counts, strict=True)) if self.counts else {}
        return ExpertUsage.of(matrices, self.shape, counts)

    def memory_request(
        self, tiles: Sequence[WeightTile], cache: Storage, compute_dtype: Dtype, *, cast_bytes: int,
        attention_bytes: tuple[int, int] = (0, 0), margin_bytes: float = 0.0,
    ) -> MemoryRequest:  # fmt: skip
        """The request to the engine's memory planner, from the model's shape alone.

        cast_bytes: bytes of the temporary copy that a product makes of each value of a tile.
        attention_bytes: as in MemoryRequest.
        margin_bytes: memory to leave free, counted among the small tensors.
        """
        value = DTYPE_BYTES[compute_dtype]
        return MemoryRequest(
            shape=self.shape,
            tiles=tiles,
            cache=cache,
            compute_bytes=value,
            cast_bytes=cast_bytes * max(tile.shape[0] * tile.shape[1] for tile in tiles),
            small_bytes=_SMALL * self.shape.hidden * self.shape.num_layers * value + int(margin_bytes),
            attention_bytes=attention_bytes,
            max_sequence=self.max_sequence,
            mean_sequence=mean_cached_length((r.prompt, r.generated) for r in self.each),
            mean_new=self.lengths.generated,
            usage=self.usage,
        )


def planned_matrices(shape: ModelShape) -> list[Matrix]:
    """The matrices of a model, or of a stage, which without the model's last layer has no head."""
    return [matrix for matrix in matrices_of(shape) if matrix.in_layer or shape.head_params]
