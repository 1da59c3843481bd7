"""Plans for our engine on one device: its own memory plan, and its passes in simulated time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from engines.common.work_memory import CONTEXT_BYTES
from engines.offload.memory.device import PINNED_SHARE, plan_device_memory, tile_values
from engines.offload.memory.kv_blocks import record_bytes
from engines.offload.memory.layout import WeightTile, matrices_of, model_tiles
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Storage, storages
from engines.planning.closed_form import RESOURCES, SublayerCosts
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.device_job import block_times, sweep_times
from engines.planning.device_pass import DevicePass
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.memory import TierBytes
from engines.planning.planned_job import SYSTEM_BYTES, PlannedJob
from engines.planning.workload import Fractions
from harness.api import DTYPE_BYTES, HardwareProfile, InfeasibleError, ModelShape, OffloadPolicy

#: Share of memory that a search leaves free, for what the engine counts and a model's shape does not tell.
_MARGIN = 1 / 32
#: Fractions of the KV cache tried where the host attends, beside as much on the device as fits.
_CACHE_FRACTIONS: tuple[Fractions, ...] = ((0.5, 0.5, 0.0), (0.0, 1.0, 0.0))
_ON_DEVICE: Fractions = (1.0, 0.0, 0.0)
_ON_DISK: Fractions = (0.0, 0.0, 1.0)


class DevicePlanner(ClosedFormPlanner):
    """Plans with the engine's own memory plan in place of FlexGen's, so that its policies run as they stand.

    Estimates by the closed form, predicts in simulated time.
    """

    simulates = True

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel) -> None:
        super().__init__(job, profile, engine)
        assert profile.device is not None
        self._device = int(profile.device.memory)
        self._host = int(PINNED_SHARE * (profile.host.memory - SYSTEM_BYTES) if job.budget is None else job.budget)
        self._plans: dict[tuple[OffloadPolicy, float], MemoryPlan] = {}

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with the fractions of the engine's memory plan, the fastest of a few; None if none fits."""
        caches: list[Fractions | None] = [policy.cache]
        if policy.cache is None and policy.cpu_attention:
            caches += _CACHE_FRACTIONS
        elif policy.cache is None and policy.schedule != "sweep":  # a sweep's goes to disk by itself
            caches.append(_ON_DISK)
        fitting = []
        for cache in caches:
            with suppress(InfeasibleError):
                realised = self.with_fractions(replace(policy, cache=cache), _MARGIN)
                prediction = self.estimate(realised)
                if not self.missing(prediction):
                    fitting.append((prediction.throughput_tok_s, realised))
        return max(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def with_fractions(self, policy: OffloadPolicy, margin: float = 0.0) -> OffloadPolicy:
        """The policy with the fractions that the engine would realise, with a share of memory left free.

        Raises InfeasibleError as the engine does.
        """
        plan = self._plan(policy, margin)
        tiles = self._tiles(policy)
        total = sum(tile.nbytes for tile in tiles)
        resident, pinned = (sum(tiles[i].nbytes for i in chosen) / total for chosen in (plan.resident, plan.pinned))
        blocks = plan.kv_blocks + plan.host_kv_blocks + plan.disk_kv_blocks
        return replace(
            policy,
            weights=policy.weights or (resident, pinned, max(0.0, 1 - resident - pinned)),
            cache=policy.cache or (plan.kv_blocks / blocks, plan.host_kv_blocks / blocks, plan.disk_kv_blocks / blocks),
            activations=policy.activations or _ON_DEVICE,
        )

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """For a policy with all fractions, by passes in simulated time. Raises InfeasibleError as the engine does."""
        estimate, plan, lengths = self.estimate(policy), self._plan(policy), self.lengths
        passes = self.passes(policy)
        if policy.schedule == "sweep":
            times = sweep_times(passes, plan.sequences, policy.nano_count, lengths, plan.chunk)
        else:
            times = block_times(passes, policy, lengths, plan.chunk)
        used = dict(zip(RESOURCES, times.used.tolist(), strict=True))
        seconds = times.prefill_s + times.decode_s
        return replace(
            estimate,
            throughput_tok_s=estimate.requests * lengths.generated / seconds,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            block_latency_s=seconds,
            bottleneck=max(used, key=lambda name: used[name]),
            used=used,
        )

    def passes(self, policy: OffloadPolicy) -> DevicePass:
        """The engine's passes in simulated time, of which none has run."""
        machine = self._machine_for(policy)
        costs = SublayerCosts(self.shape, policy, machine, self._engine_for(policy))
        return DevicePass(self._tiles(policy), self._plan(policy), self.job.usage, costs, machine)

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """By the closed form. Raises InfeasibleError as the engine does."""
        plan = self._plan(policy)
        if policy.schedule == "sweep":
            policy = replace(policy, gpu_batch_size=plan.sequences)
        prediction = super().predict(policy)
        tiles = self._tiles(policy)
        on_disk = sum(b.nbytes for i, b in enumerate(tiles) if i not in plan.resident and i not in plan.pinned)
        cache = storages(self.job.dtype, policy)[2]
        on_disk += plan.disk_kv_blocks * self.shape.num_layers * record_bytes(self.shape, cache)
        peak = TierBytes(float(plan.total_bytes + CONTEXT_BYTES), float(plan.pinned_bytes), float(on_disk))
        return replace(prediction, peak=peak)

    def _plan(self, policy: OffloadPolicy, margin: float = 0.0) -> MemoryPlan:
        """The engine's memory plan. Raises InfeasibleError and UnsupportedError as the engine does."""
        if (policy, margin) not in self._plans:
            dtype = policy.float_dtype("offload on a device", self.job.dtype)
            copies = 2 if policy.weight_format == "exact12" else int(policy.weight_bits != 16)
            cast_bytes = copies * DTYPE_BYTES[dtype]
            cache = storages(self.job.dtype, policy)[2]
            request = self.job.memory_request(self._tiles(policy), cache, dtype, cast_bytes=cast_bytes)
            device, host = (int(memory * (1 - margin)) for memory in (self._device, self._host))
            self._plans[policy, margin] = plan_device_memory(request, policy, device, host)
        return self._plans[policy, margin]

    def _tiles(self, policy: OffloadPolicy) -> Sequence[WeightTile]:
        return _tiles(self.shape, *storages(self.job.dtype, policy)[:2])


@lru_cache(maxsize=64)
def _tiles(shape: ModelShape, layers: Storage, outside: Storage) -> Sequence[WeightTile]:
    return model_tiles(matrices_of(shape), layers, outside, tile_values(shape))
