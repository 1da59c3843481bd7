"""Builds the memory planner's request for a job from a model's shape alone, without its checkpoint."""

from collections.abc import Sequence

from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Storage
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, Dtype, ModelShape
from harness.api.machine import mean_cached_length

#: Bytes of host memory that the operating system and idle processes take.
SYSTEM_BYTES = 1.5e9
#: Norms and biases of a layer, in multiples of the hidden size.
_SMALL = 16


def memory_request(
    shape: ModelShape, tiles: Sequence[WeightTile], cache: Storage, compute_dtype: Dtype, requests: Sequence[Lengths],
    *, reserved: int | None, cast_bytes: int, attention_bytes: tuple[int, int],
) -> MemoryRequest:  # fmt: skip
    """The request for a job of such requests.

    reserved: tokens that each sequence may grow to; None for the longest request.
    cast_bytes: bytes of the temporary copy that a product makes of each value of a tile.
    attention_bytes: as in MemoryRequest.
    """
    value = DTYPE_BYTES[compute_dtype]
    return MemoryRequest(
        shape=shape,
        tiles=tiles,
        cache=cache,
        compute_bytes=value,
        cast_bytes=cast_bytes * max(tile.shape[0] * tile.shape[1] for tile in tiles),
        small_bytes=_SMALL * shape.hidden * shape.num_layers * value,
        attention_bytes=attention_bytes,
        max_sequence=reserved or longest(requests),
        mean_sequence=mean_cached_length((r.prompt, r.generated) for r in requests),
    )


def longest(requests: Sequence[Lengths]) -> int:
    """Tokens of the longest request."""
    return max(r.prompt + r.generated for r in requests)
