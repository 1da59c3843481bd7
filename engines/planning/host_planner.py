"""Plans for machines without a device: the engine's own memory plan, and its schedule in virtual time."""

import itertools
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from engines.offload.memory.attention_scratch import attention_memory, may_be_in_bfloat16
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.layout import WeightTile, model_tiles
from engines.offload.memory.pass_time import PassRates
from engines.offload.memory.storage import WeightStorage, panels_of, storages, weight_formats
from engines.offload.prefill_budget import SimulatedSequence, steady_blocks
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction, bound, require_modelled
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.machine import Machine, attention_rate
from engines.planning.memory import TierBytes
from engines.planning.planned_job import SYSTEM_BYTES, PlannedJob, planned_matrices
from engines.planning.simulator import PlacedModel, Simulator
from engines.planning.threads import on_threads
from engines.planning.virtual_job import run_job
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, HardwareProfile, HarnessError, InfeasibleError, ModelShape, OffloadPolicy

#: Tiles of a pass that are simulated. Large models are cut into fewer, larger tiles than the engine's.
_TILES = 256
#: Rows and columns of the tile whose time stands for all, and bytes of a read at which a disk reaches its rate.
_MEASURED_TILE, _READ_BYTES = (1024, 2048), 4 << 20
#: Sequences of a block at most: a host's products reach their best rate long before.
_MAX_SEQUENCES = 1024


class HostPlanner(ClosedFormPlanner):
    """Plans our engine on a machine without a device: estimates by the closed form, predicts in virtual time.

    `stage_wait_s`: as in place_model.
    """

    def __init__(self, job: PlannedJob, profile: HardwareProfile, stage_wait_s: float | None = None) -> None:
        super().__init__(job, profile, engine_cost_model("offload"))
        self._stage_wait_s = stage_wait_s
        self._placements: dict[OffloadPolicy, PlacedModel] = {}
        self._budget = int(job.budget if job.budget is not None else profile.host.memory - SYSTEM_BYTES)
        if self._budget <= 0:
            raise InfeasibleError(
                f"infeasible on {profile.name}: the system alone takes {SYSTEM_BYTES:,.0f} bytes of the host's "
                f"{profile.host.memory:,.0f}",
                {"host": -self._budget},
            )

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy itself if it fits memory and disk and has at most _MAX_SEQUENCES sequences."""
        if policy.block_size <= _MAX_SEQUENCES:
            with suppress(InfeasibleError):
                return policy if self.placed(policy).disk_bytes <= self.profile.disk.capacity else None
        return None

    def with_fractions(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the fractions that the engine would realise. Raises InfeasibleError as the engine does."""
        placed = self.placed(policy)
        on_disk = placed.streamed_bytes / sum(tile.nbytes for tile in placed.tiles)
        cache_on_disk = placed.plan.disk_kv_blocks / (placed.plan.kv_blocks + placed.plan.disk_kv_blocks)
        return replace(
            policy,
            weights=(0.0, 1 - on_disk, on_disk),
            cache=policy.cache or (0.0, 1 - cache_on_disk, cache_on_disk),
            activations=policy.activations or (0.0, 1.0, 0.0),
        )

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """By the closed form. Raises InfeasibleError for a policy that does not fit."""
        closed_form = ClosedFormPlanner(self.job, self._profile_for(policy), self.engine)
        realised = self.with_fractions(policy)
        if policy.schedule == "sweep":
            realised = replace(realised, gpu_batch_size=self.placed(policy).plan.sequences)
        prediction = closed_form.predict(realised)
        # the closed form's device is what multiplies: here the host, which attends too
        used = {"host": prediction.used["device"] + prediction.used["host"], "disk": prediction.used["disk"]}
        return replace(prediction, used=used, bottleneck=max(used, key=lambda name: used[name]))

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """By running the job in virtual time. Raises InfeasibleError for a policy that does not fit."""
        placed = self.placed(policy)
        simulator = Simulator(placed, policy, Machine(self._profile_for(policy)))
        times = JobTimes.of(self.job, policy, placed.plan.sequences)
        run_job([simulator], times.sequences)
        timeline = simulator.timeline
        busy = timeline.tasks["task_products"] + timeline.tasks["task_attention"]
        return Prediction(
            requests=len(times.requests),
            together=placed.plan.sequences,
            throughput_tok_s=times.throughput_tok_s,
            prefill_s=times.prefill_s,
            decode_s=times.total_s - times.prefill_s,
            block_latency_s=times.block_s,
            bottleneck="host" if busy > timeline.load_s else "disk",
            bound=bound(self.job, policy, simulator.machine, placed.plan.sequences),
            peak=TierBytes(0.0, float(placed.plan.total_bytes), float(placed.disk_bytes)),
            used={"host": busy, "disk": timeline.load_s},
            trace=timeline.trace(),
        )

    def read_share(self, policy: OffloadPolicy, rows: int) -> float:
        return self.job.usage.read_share(self.placed(policy).tiles, rows)

    def _profile_for(self, policy: OffloadPolicy) -> HardwareProfile:
        """The machine on the policy's threads."""
        host = self.profile.host
        return self.profile if policy.threads is None else replace(self.profile, host=on_threads(host, policy.threads))

    def placed(self, policy: OffloadPolicy) -> PlacedModel:
        """The model as the engine would load it. Raises InfeasibleError as the engine does."""
        require_modelled(policy)
        if policy.compute_dtype not in ("auto", self.profile.host.dtype):
            rates = f"hardware {self.profile.name} has rates in {self.profile.host.dtype}"
            raise HarnessError(f"policy.compute_dtype {policy.compute_dtype}: {rates}")
        if policy not in self._placements:
            threads = policy.threads or self.profile.host.cores
            machine = Machine(self._profile_for(policy))
            wait_s = self._stage_wait_s
            self._placements[policy] = place_model(self.job, policy, self._budget, threads, machine, wait_s)
        return self._placements[policy]


def place_model(
    job: PlannedJob, policy: OffloadPolicy, budget: int | None, threads: int, machine: Machine,
    stage_wait_s: float | None = None,
) -> PlacedModel:  # fmt: skip
    """Places a model as the engine would within `budget` bytes (None: unlimited), by the rates of `machine`.

    `stage_wait_s`: for a stage of a pipeline, the seconds that links add to a pass; its cache stays in memory.

    Raises InfeasibleError as the engine does.
    """
    placed, refusal = list[PlacedModel](), None
    for twelve_bits in weight_formats(policy, budget is not None):
        try:
            placed.append(_place(job, policy, budget, threads, machine, stage_wait_s, twelve_bits))
        except InfeasibleError as exc:
            refusal = exc
    if refusal is not None and not placed:
        raise refusal
    return max(placed, key=lambda one: one.plan.tokens_per_s)


def _place(
    job: PlannedJob, policy: OffloadPolicy, budget: int | None, threads: int, machine: Machine,
    stage_wait_s: float | None, twelve_bits: bool,
) -> PlacedModel:  # fmt: skip
    """With bfloat16 in `twelve_bits` or plain."""
    layers, outside, cache = storages(job.dtype, policy)
    compute_dtype = machine.host.dtype
    in_panels = [panels_of(stored, twelve_bits) for stored in (layers, outside)]
    tiles = _tiles(job.shape, in_panels[0] or layers, in_panels[1] or outside)
    fused = compute_dtype == "float32" or in_panels[0] is not None  # the kernel dequantizes in registers
    request = job.memory_request(
        tiles, cache, compute_dtype,
        cast_bytes=0 if fused or policy.weight_bits == 16 else 4 + DTYPE_BYTES[compute_dtype],
        attention_bytes=attention_memory(
            job.shape, cache, job.max_sequence, threads, may_be_in_bfloat16(cache, compute_dtype),
            policy.value_sparsity < 1,
        ),
    )  # fmt: skip
    rates = replace(_rates(machine, in_panels[0] or layers, policy), wait_s=stage_wait_s or 0.0)
    weights_on_disk = max(0, request.weight_bytes - (request.weight_bytes if budget is None else budget))
    cache_on_disk = machine.profile.disk.capacity - weights_on_disk if stage_wait_s is None else 0
    plan = plan_host_memory(request, policy, budget, rates, cache_on_disk)
    return PlacedModel(job.shape, tiles, cache, plan, job.usage)


def _rates(machine: Machine, stored: WeightStorage, policy: OffloadPolicy) -> PassRates:
    """What a pass can count on with weights `stored` so."""
    rows, columns = _MEASURED_TILE
    values, nbytes = rows * columns, stored.matrix_bytes(rows, columns)

    def value_s(count: float) -> float:
        return machine.tile_s(math.ceil(count), values, nbytes, stored) / values

    memory = attention_rate(machine.host, policy.kv_bits)
    disk = machine.profile.disk
    return PassRates(disk.read, _READ_BYTES, value_s, memory, disk.write)


@lru_cache(maxsize=64)
def _tiles(shape: ModelShape, layers: WeightStorage, outside: WeightStorage) -> Sequence[WeightTile]:
    matrices = planned_matrices(shape)
    tiles = model_tiles(matrices, layers, outside)
    if len(tiles) > _TILES:
        tiles = model_tiles(matrices, layers, outside, sum(m.rows * m.columns for m in matrices) // _TILES)
    return tiles


@dataclass(frozen=True)
class JobTimes:
    """The sequences of a job that is simulated, and its times once it was."""

    requests: Sequence[Lengths]
    sequences: Sequence[SimulatedSequence]
    policy: OffloadPolicy

    @classmethod
    def of(cls, job: PlannedJob, policy: OffloadPolicy, together: int) -> Self:
        """The requests of a job of which so many run together; several blocks of them, where it sets no number."""
        count = job.requests or together * steady_blocks(policy)
        requests = list(itertools.islice(itertools.cycle(job.each), count))
        return cls(requests, simulated_sequences(requests), policy)

    @property
    def total_s(self) -> float:
        return max(s.times[-1] for s in self.sequences)

    @property
    def throughput_tok_s(self) -> float:
        return sum(r.generated for r in self.requests) / self.total_s

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill over all blocks; none of a sweep, which has no such phase."""
        if self.policy.schedule == "sweep":
            return 0.0
        starts = [0.0, *(max(s.times[-1] for s in block) for block in self._blocks)]
        firsts = [max(s.times[0] for s in block) for block in self._blocks]
        return sum(max(0.0, first - start) for first, start in zip(firsts, starts, strict=False))

    @property
    def block_s(self) -> float:
        """The median of the blocks' times; of a sweep a sequence's, whose prompt is taken to last as long as the first
        one's."""
        if self.policy.schedule == "sweep":
            return statistics.median(s.times[-1] - s.times[0] for s in self.sequences) + self.sequences[0].times[0]
        ends = [0.0, *(max(s.times[-1] for s in block) for block in self._blocks)]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))

    @property
    def _blocks(self) -> list[Sequence[SimulatedSequence]]:
        size = self.policy.block_size
        return [self.sequences[i : i + size] for i in range(0, len(self.sequences), size)]


def simulated_sequences(requests: Sequence[Lengths]) -> list[SimulatedSequence]:
    """Sequences for the simulator; no two share a prefix."""
    return [SimulatedSequence([i + 1] * r.prompt, r.generated) for i, r in enumerate(requests)]
