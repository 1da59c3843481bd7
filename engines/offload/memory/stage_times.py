"""Predicts what each number of layers takes on a rank, by its rates and within its memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.offload.memory.attention_scratch import attention_memory, may_be_in_bfloat16
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.layout import TILE_VALUES, matrices_of, model_tiles
from engines.offload.memory.partition import StageSeconds
from engines.offload.memory.pass_time import JobPasses, PassRates
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Storage, WeightStorage
from harness.api import DTYPE_BYTES, Dtype, InfeasibleError, ModelShape, OffloadPolicy

#: Tiles of the whole model at most: the tiles of a large model would take longer to plan than they are worth here.
_TILES = 512
#: Two measurements of one rate may differ by this factor. Rates are compared for products of so many rows.
_ALIKE = 1.1
_ROWS = (1, 16, 256)


def stage_shape(whole: ModelShape, layers: int, is_last: bool) -> ModelShape:
    """The sizes of so many of a model's layers, with its head if they are the last."""
    idle = whole.params_idle * layers // whole.num_layers
    head = whole.head_params if is_last else 0
    total = idle + whole.params_per_layer * layers + head
    return replace(whole, num_layers=layers, params_idle=idle, params_total=total)


@dataclass(frozen=True)
class RankRates:
    """What a rank has told of itself: its rates, threads, and bytes of memory (None: no limit)."""

    rates: PassRates
    threads: int
    budget: int | None


def alike(ranks: Sequence[RankRates]) -> bool:
    """Whether ranks have the same threads and memory, and no rate differs by more than a measurement of it may."""
    by_rank = [(one.rates.disk, one.rates.memory, *map(one.rates.value_s, _ROWS)) for one in ranks]
    same = len({(one.threads, one.budget) for one in ranks}) == 1
    return same and all(max(rates) <= _ALIKE * min(rates) for rates in zip(*by_rank, strict=True))


@dataclass(frozen=True)
class StageTimes:
    """The stages of a model of `shape` under a policy.

    layers, outside, cache: how decoder layers' weights, other weights, and keys and values are stored.
    dtype: of activations.
    max_sequence, mean_sequence, mean_new: as in MemoryRequest.

    Embeddings are looked up in a mapped file: they cost a stage neither memory nor time.
    """

    shape: ModelShape
    policy: OffloadPolicy
    layers: WeightStorage
    outside: WeightStorage
    cache: Storage
    dtype: Dtype
    max_sequence: int
    mean_sequence: int
    mean_new: int

    def on(self, ranks: Sequence[RankRates]) -> StageSeconds:
        """The times of any cut over `ranks`, in the order of their stages; the last one has the head."""
        counts, last_stage = range(1, self.shape.num_layers + 1), len(ranks) - 1
        table = [[self.seconds(rank, n, is_last=k == last_stage) for n in counts] for k, rank in enumerate(ranks)]
        return lambda stage, first, last: table[stage][last - first - 1]

    def seconds(self, rank: RankRates, layers: int, is_last: bool) -> float:
        """Seconds of a pass of a token of every sequence, by the number of sequences that run: the longer of arithmetic
        and of reading what memory does not hold. Infinite where the memory is too small for a sequence."""
        shape = stage_shape(self.shape, layers, is_last)
        matrices = matrices_of(shape)
        matrices = matrices if is_last else [matrix for matrix in matrices if matrix.in_layer]
        large = self.shape.params_total // _TILES
        request = MemoryRequest(
            shape=shape,
            tiles=model_tiles(matrices, self.layers, self.outside, large if large > TILE_VALUES else None),
            cache=self.cache,
            compute_bytes=DTYPE_BYTES[self.dtype],
            cast_bytes=0,
            small_bytes=0,
            attention_bytes=attention_memory(
                shape,
                self.cache,
                self.max_sequence,
                rank.threads,
                may_be_in_bfloat16(self.cache, self.dtype),
                self.policy.value_sparsity < 1,
            ),
            max_sequence=self.max_sequence,
            mean_sequence=self.mean_sequence,
            usage=ExpertUsage.of(matrices, shape),
            mean_new=self.mean_new,
        )
        try:
            plan = plan_host_memory(request, self.policy, rank.budget, rank.rates, disk=0)
        except InfeasibleError:
            return math.inf
        nbytes = request.streamed_bytes(plan.resident, plan.sequences)
        passes = JobPasses(request, self.policy, rank.rates, plan.sequences, plan.chunk, nbytes)
        return passes.decode_pass().seconds(self.policy.overlap) / plan.sequences
