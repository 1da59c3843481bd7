"""The longest sequence that our engine's memory plan admits, computed from a model's shape without loading anything.

The loader counts things that a shape does not tell: the exact sizes of small tensors, how matrices are cut into tiles,
and the buffers of whichever arithmetic is fastest on this CPU. The plan here takes the largest value for each and
leaves a share of the limits free, so it errs on the short side. Where it is still too optimistic (without a C++
compiler, for example, attention needs more memory), `load` raises InfeasibleError by its own count.
"""

from itertools import pairwise

from engines.offload.memory.attention_scratch import attention_memory, may_be_in_bfloat16
from engines.offload.memory.device import PINNED_SHARE, plan_device_memory, tile_values
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.layout import matrices_of, model_tiles
from engines.offload.memory.plan import largest
from engines.offload.memory.stage_times import stage_shape
from engines.offload.memory.storage import Plain, Storage, storages
from engines.offload.memory.tensor_shard import TensorShard, refuse_undivided
from engines.offload.pipeline.cut import even_ends
from engines.planning.planned_job import PlannedJob
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, Dtype, InfeasibleError, LocalModel, RunSpec
from harness.common.host_cpu import cpu_flags
from harness.common.host_memory import free_memory
from harness.common.system import usable_cpus

#: The share of each limit that stays free for what a shape does not tell.
_MARGIN = 1 / 32


def longest_sequence(spec: RunSpec, model: LocalModel, shortest: int) -> int:
    """The most tokens (prompt and new) that a sequence may have under a policy and limits, up to the model's context.

    Raises InfeasibleError, with the numbers, if not even a sequence of `shortest` tokens fits, and UnsupportedError for
    a placement that the engine does not support, or ranks that the model cannot be divided over.
    """
    planner = _Planner(spec, model)
    planner.plan(shortest, margin=0)
    return max(shortest, largest(model.shape.max_context, planner.fits))


class _Planner:
    """Memory plans for a cell's model, policy and limits by the length of the longest sequence."""

    def __init__(self, spec: RunSpec, model: LocalModel) -> None:
        policy, limits = spec.policy, spec.limits
        self._shape = model.shape
        if (shard := TensorShard.under(policy, 0)) is not None:
            refuse_undivided(policy, limits, model.shape)
            self._shape = shard.shape(model.shape)
        if policy.pipeline > 1:  # of the rank with most layers, as ranks that are alike have them
            ends = even_ends(model.shape, policy.pipeline)
            most = max(end - begin for begin, end in pairwise([0, *ends]))
            self._shape = stage_shape(model.shape, most, is_last=True)
        self._policy = policy
        self._device = limits.device_memory
        self._host = limits.host_memory
        if self._device is not None and self._host is None:
            self._host = int(PINNED_SHARE * free_memory())
        layers, outside, self._cache = storages(model.dtype, policy)
        # on a host, `auto` is settled at load, by which is fastest there
        auto: list[Dtype] = [model.dtype] if self._device is not None else [model.dtype, "float32"]
        dtypes = auto if policy.compute_dtype in ("auto", "int8") else [policy.float_dtype("offload", model.dtype)]
        self._dtype = max(dtypes, key=lambda name: DTYPE_BYTES[name])
        # with units for bfloat16, `auto` settles on it
        units = "avx512_bf16" in cpu_flags()
        self._in_bfloat16 = units and any(may_be_in_bfloat16(self._cache, name) for name in dtypes)
        self._cast_bytes = sum(max(_cast_bytes(stored, name) for name in dtypes) for stored in {layers, outside})
        if policy.weight_format == "exact12" and self._device is not None:
            self._cast_bytes += 2 * DTYPE_BYTES[model.dtype]  # a tile's values, of those that are plain too
        tile_limit = None if self._device is None else tile_values(self._shape)
        self._tiles = model_tiles(matrices_of(self._shape), layers, outside, tile_limit)
        threads = (policy.threads, limits.threads, usable_cpus())
        self._threads = min(count for count in threads if count is not None)

    def plan(self, tokens: int, margin: float = _MARGIN) -> None:
        """Raises InfeasibleError where sequences of `tokens` tokens do not fit into the limits less the margin."""
        first_tier = self._host if self._device is None else self._device
        request = PlannedJob(self._shape, [Lengths(tokens, 0)]).memory_request(
            self._tiles, self._cache, self._dtype, cast_bytes=self._cast_bytes, margin_bytes=margin * (first_tier or 0),
            attention_bytes=self._attention_bytes(tokens) if self._device is None else (0, 0),
        )  # fmt: skip
        if self._device is None:
            plan_host_memory(request, self._policy, self._host)
        else:
            assert self._host is not None
            plan_device_memory(request, self._policy, self._device, int(self._host * (1 - margin)))

    def _attention_bytes(self, tokens: int) -> tuple[int, int]:
        sparse = self._policy.value_sparsity < 1
        return attention_memory(self._shape, self._cache, tokens, self._threads, self._in_bfloat16, sparse)

    def fits(self, tokens: int) -> bool:
        """Whether sequences of so many tokens fit."""
        try:
            self.plan(tokens)
        except InfeasibleError:
            return False
        return True


def _cast_bytes(stored: Storage, dtype: Dtype) -> int:
    """Bytes of the copies of a tile's value before its product, at most: as values of float32 and of `dtype`."""
    if stored == Plain(dtype):
        return 0
    return DTYPE_BYTES["float32"] + (DTYPE_BYTES[dtype] if dtype != "float32" else 0)
