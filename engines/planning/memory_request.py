"""What our engine is to place for a job, told by a model's shape alone."""

from __future__ import annotations

from collections.abc import Sequence

from engines.offload.memory.layout import WeightTile
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Storage
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, Dtype, ModelShape

#: Of the host's memory what the system and idle processes take.
SYSTEM_BYTES = 1.5e9
#: Small tensors of a layer, norms and biases, in hidden sizes.
_SMALL = 16


def demand(
    shape: ModelShape, tiles: Sequence[WeightTile], cache: Storage, compute_dtype: Dtype, requests: Sequence[Lengths],
    *, reserved: int | None, cast_bytes: int, attention: tuple[int, int],
) -> MemoryRequest:  # fmt: skip
    """For such requests, each of which may grow to `reserved` tokens, if not to as many as the longest has.

    `cast_bytes`: of each value of a tile that is unpacked. `attention`: see MemoryRequest.
    """
    value = DTYPE_BYTES[compute_dtype]
    return MemoryRequest(
        shape=shape,
        tiles=tiles,
        cache=cache,
        compute_bytes=value,
        cast_bytes=cast_bytes * max(b.shape[0] * b.shape[1] for b in tiles),
        small_bytes=_SMALL * shape.hidden * shape.num_layers * value,
        attention_bytes=attention,
        max_sequence=reserved or longest(requests),
        mean_sequence=sum(r.prompt + r.generated // 2 for r in requests) // len(requests),
    )


def longest(requests: Sequence[Lengths]) -> int:
    """Tokens of the longest."""
    return max(r.prompt + r.generated for r in requests)
