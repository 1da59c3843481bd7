"""Plans for our engine on one device: its own memory plan, by the machine's rates, and its passes in virtual time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from engines.common.work_memory import CONTEXT_BYTES
from engines.offload.memory.device import PINNED_SHARE, plan_device_memory, tile_values
from engines.offload.memory.kv_blocks import record_bytes
from engines.offload.memory.layout import WeightTile, model_tiles
from engines.offload.memory.pass_time import LinkRates, PassRates
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.storage import Storage, storages
from engines.planning.closed_form import SublayerCosts
from engines.planning.closed_form_planner import ClosedFormPlanner, Phases, Prediction, require_modelled
from engines.planning.device_job import block_phases, sweep_phases
from engines.planning.device_pass import DevicePass
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import attention_rate, unpack_rate
from engines.planning.memory import TierBytes
from engines.planning.planned_job import SYSTEM_BYTES, PlannedJob, planned_matrices
from engines.planning.workload import VALUE_BYTES, Fractions
from harness.api import DTYPE_BYTES, HardwareProfile, InfeasibleError, ModelShape, OffloadPolicy

#: Share of memory that a search leaves free, for what the engine counts and a model's shape does not tell.
_MARGIN = 1 / 32
_ON_DEVICE: Fractions = (1.0, 0.0, 0.0)
#: Values of a product that stands for all: large enough to reach the rates of a profile's curves.
_VALUES = 1 << 24


class DevicePlanner(ClosedFormPlanner):
    """Plans with the engine's own memory plan in place of FlexGen's, so that its policies run as they stand.

    Estimates by the closed form, predicts in virtual time.
    """

    def __init__(self, job: PlannedJob, profile: HardwareProfile, engine: EngineCostModel) -> None:
        super().__init__(job, profile, engine)
        assert profile.device is not None
        self._device = int(profile.device.memory)
        self._host = int(PINNED_SHARE * (profile.host.memory - SYSTEM_BYTES) if job.budget is None else job.budget)
        self._plans: dict[tuple[OffloadPolicy, float], MemoryPlan] = {}

    @property
    def divides_experts(self) -> bool:
        return self.shape.params_idle > 0

    def read_share(self, policy: OffloadPolicy, rows: int) -> float:
        return self.job.usage.read_share(self._tiles(policy), rows)

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with the fractions of the engine's memory plan, and as many of a sweep's sequences as it runs;
        None if it does not fit."""
        with suppress(InfeasibleError):
            realised = self.with_fractions(policy, _MARGIN)
            if policy.schedule == "sweep":
                realised = replace(realised, gpu_batch_size=self._plan(policy, _MARGIN).sequences)
            return None if self.missing(self.estimate(realised)) else realised
        return None

    def with_fractions(self, policy: OffloadPolicy, margin: float = 0.0) -> OffloadPolicy:
        """The policy with the fractions, and a sweep's chunk, that the engine would realise with a share of memory left
        free.

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
            prefill_chunk=plan.chunk if policy.schedule == "sweep" else policy.prefill_chunk,
        )

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """For a policy with all fractions, by passes in virtual time. Raises InfeasibleError as the engine does."""
        require_modelled(policy)
        running = self._running(policy)
        return self._prediction(running, self.phases(running, policy), self.peak(policy))

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """By the closed form. Raises InfeasibleError as the engine does."""
        require_modelled(policy)
        running, peak = self._running(policy), self.peak(policy)
        engine = self._engine_for(running)
        return self._prediction(
            running, self._phases(self.shape, running, engine, peak, SublayerCosts.pass_seconds), peak
        )

    def phases(self, running: OffloadPolicy, policy: OffloadPolicy) -> Phases:
        """How long the sequences of `running` take in virtual time, which are all or some of a policy's."""
        plan, passes = self._plan(policy), self.passes(running, policy)
        if running.schedule == "sweep":
            return sweep_phases(passes, plan.sequences, running.nano_count, self.lengths, plan.chunk)
        return block_phases(passes, running, self.lengths, plan.chunk)

    def passes(self, running: OffloadPolicy, policy: OffloadPolicy) -> DevicePass:
        """As phases: the passes, of which none has run."""
        machine = self._machine_for(running)
        costs = SublayerCosts(self.shape, running, machine, self._engine_for(running))
        return DevicePass(self._tiles(policy), self._plan(policy), self.job.usage, costs, machine)

    def peak(self, policy: OffloadPolicy) -> TierBytes:
        """Bytes of each tier by the engine's memory plan. Raises InfeasibleError as the engine does."""
        plan, tiles = self._plan(policy), self._tiles(policy)
        on_disk = sum(b.nbytes for i, b in enumerate(tiles) if i not in plan.resident and i not in plan.pinned)
        cache = storages(self.job.dtype, policy)[2]
        on_disk += plan.disk_kv_blocks * self.shape.num_layers * record_bytes(self.shape, cache)
        return TierBytes(float(plan.total_bytes + CONTEXT_BYTES), float(plan.pinned_bytes), float(on_disk))

    def _running(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with as many of a sweep's sequences as the memory plan lets run."""
        return replace(policy, gpu_batch_size=self._plan(policy).sequences) if policy.schedule == "sweep" else policy

    def _plan(self, policy: OffloadPolicy, margin: float = 0.0) -> MemoryPlan:
        """The engine's memory plan. Raises InfeasibleError and UnsupportedError as the engine does."""
        if (policy, margin) not in self._plans:
            dtype = policy.float_dtype("offload on a device", self.job.dtype)
            copies = 2 if policy.weight_format == "exact12" else int(policy.weight_bits != 16)
            cast_bytes = copies * DTYPE_BYTES[dtype]
            cache = storages(self.job.dtype, policy)[2]
            request = self.job.memory_request(self._tiles(policy), cache, dtype, cast_bytes=cast_bytes)
            device, host = (int(memory * (1 - margin)) for memory in (self._device, self._host))
            disk = self.profile.disk.capacity - max(0, request.weight_bytes - device - host)
            rates = self._rates(policy)
            self._plans[policy, margin] = plan_device_memory(request, policy, device, host, rates, disk)
        return self._plans[policy, margin]

    def _rates(self, policy: OffloadPolicy) -> PassRates:
        """What the engine's placement counts on, of this machine."""
        machine, disk = self._machine_for(policy), self.profile.disk
        unpack_s, attend_s = (
            0.0 if bits == 16 else 1 / unpack_rate(machine.dense, bits) for bits in (policy.weight_bits, policy.kv_bits)
        )

        def value_s(rows: float) -> float:
            return machine.product_s(rows, _VALUES, _VALUES * VALUE_BYTES) / _VALUES + unpack_s

        stored = policy.value_bytes(policy.kv_bits, VALUE_BYTES)
        memory = stored / (VALUE_BYTES / machine.dense.bandwidth + attend_s)
        link = LinkRates(machine.link.h2d, machine.link.d2h, attention_rate(machine.host, policy.kv_bits))
        read_bytes = int(VALUE_BYTES) * tile_values(self.shape)
        return PassRates(disk.read, read_bytes, value_s, memory, disk.write, link)

    def _tiles(self, policy: OffloadPolicy) -> Sequence[WeightTile]:
        return _tiles(self.shape, *storages(self.job.dtype, policy)[:2])


@lru_cache(maxsize=64)
def _tiles(shape: ModelShape, layers: Storage, outside: Storage) -> Sequence[WeightTile]:
    return model_tiles(planned_matrices(shape), layers, outside, tile_values(shape))
