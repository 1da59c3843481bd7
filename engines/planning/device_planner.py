"""Plans for our engine on one device: what it would place where by its own arithmetic, and what that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from engines.common.work_memory import CONTEXT_BYTES
from engines.offload.memory.device import PINNED_SHARE, plan_device_memory, tile_values
from engines.offload.memory.layout import WeightTile, matrices_of, tiles_of
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Storage, storages
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.memory import Peak
from engines.planning.memory_request import SYSTEM_BYTES, demand
from engines.planning.workload import Fractions, Lengths
from harness.api import DTYPE_BYTES, Dtype, HardwareProfile, InfeasibleError, ModelShape, OffloadPolicy

#: Of memory what a search leaves free: a shape does not tell all that the engine counts.
_MARGIN = 1 / 32
#: Parts of the cache on the device and in host memory that are tried where the host attends, beside as much on the
#: device as there is room for.
_CACHES: tuple[Fractions, ...] = ((0.5, 0.5, 0.0), (0.0, 1.0, 0.0))
_ON_DEVICE: Fractions = (1.0, 0.0, 0.0)


class DevicePlanner(ClosedFormPlanner):
    """As ClosedFormPlanner, with the memory of the engine instead of FlexGen's: what a plan says can be run as it
    stands.

    `each`, `dtype`, `reserved`: as HostPlanner. `budget`: bytes of pinned memory; None for what the engine takes of a
    host by itself.
    """

    def __init__(
        self, shape: ModelShape, lengths: Lengths, profile: HardwareProfile, *, each: Sequence[Lengths] = (),
        dtype: Dtype = "float16", budget: float | None = None, reserved: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape, lengths, profile, "offload")
        assert profile.device is not None
        self._device = int(profile.device.memory)
        self._host = int(PINNED_SHARE * (profile.host.memory - SYSTEM_BYTES) if budget is None else budget)
        self._each = each or [lengths]
        self._dtype = dtype
        self._reserved = reserved
        self._plans: dict[tuple[OffloadPolicy, float], MemoryPlan] = {}

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with the fractions of the engine's own placement, the fastest of a few; None where none fits."""
        found = []
        for cache in self._caches(policy):
            with suppress(InfeasibleError):
                one = self._realised(replace(policy, cache=cache), _MARGIN)
                prediction = self.estimate(one)
                if not self.lacking(prediction):
                    found.append((prediction.throughput_tok_s, one))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def placed(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the fractions that the engine would realise. Raises InfeasibleError as it does."""
        if policy.weights and policy.cache and policy.activations:
            self._plan(policy)
            return policy
        return self._realised(policy)

    def predict(self, policy: OffloadPolicy, page_cache: bool = True) -> Prediction:
        """Of a policy that names all fractions. Raises InfeasibleError where the engine would."""
        plan = self._plan(policy)
        if policy.schedule == "sweep":
            policy = replace(policy, gpu_batch_size=plan.sequences)
        found = super().predict(policy, page_cache)
        tiles = self._tiles(policy)
        on_disk = sum(b.nbytes for i, b in enumerate(tiles) if i not in plan.resident and i not in plan.pinned)
        return replace(
            found, peak=Peak(float(plan.total_bytes + CONTEXT_BYTES), float(plan.pinned_bytes), float(on_disk))
        )

    estimate = predict

    def _caches(self, policy: OffloadPolicy) -> Iterator[Fractions | None]:
        yield policy.cache
        if policy.cache is None and policy.cpu_attention:
            yield from _CACHES

    def _realised(self, policy: OffloadPolicy, margin: float = 0.0) -> OffloadPolicy:
        plan = self._plan(policy, margin)
        tiles = self._tiles(policy)
        whole = sum(b.nbytes for b in tiles)
        resident, pinned = (sum(tiles[i].nbytes for i in chosen) / whole for chosen in (plan.resident, plan.pinned))
        blocks = plan.kv_blocks + plan.host_kv_blocks
        return replace(
            policy,
            weights=policy.weights or (resident, pinned, max(0.0, 1 - resident - pinned)),
            cache=policy.cache or (plan.kv_blocks / blocks, plan.host_kv_blocks / blocks, 0.0),
            activations=policy.activations or _ON_DEVICE,
        )

    def _plan(self, policy: OffloadPolicy, margin: float = 0.0) -> MemoryPlan:
        """The engine's own. Raises InfeasibleError, and UnsupportedError for what has no place there, as it does."""
        if (policy, margin) not in self._plans:
            dtype = self._dtype if policy.compute_dtype == "auto" else policy.compute_dtype
            packed = policy.weight_bits != 16
            wanted = demand(
                self.shape, self._tiles(policy), storages(self._dtype, policy)[2], dtype, self._each,
                reserved=self._reserved, cast_bytes=DTYPE_BYTES[dtype] if packed else 0, attention=(0, 0),
            )  # fmt: skip
            device, host = (int(memory * (1 - margin)) for memory in (self._device, self._host))
            self._plans[policy, margin] = plan_device_memory(wanted, policy, device, host)
        return self._plans[policy, margin]

    def _tiles(self, policy: OffloadPolicy) -> Sequence[WeightTile]:
        return _tiles(self.shape, *storages(self._dtype, policy)[:2])


@lru_cache(maxsize=64)
def _tiles(shape: ModelShape, layers: Storage, outside: Storage) -> Sequence[WeightTile]:
    """The tiles of a model whose layers and whose other matrices are stored so."""
    matrices = matrices_of(shape)
    return tiles_of(matrices, [layers if m.in_layer else outside for m in matrices], tile_values(shape))
