"""Plans for machines without a device: the engine's own placement, and its schedule in virtual time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from engines.offload.memory.host import attention_memory, plan_host_memory
from engines.offload.memory.layout import WeightTile, matrices_of, tiles_of
from engines.offload.memory.storage import Storage, storages
from engines.offload.prefill_budget import SimulatedSequence
from engines.offload.scheduler import steady_blocks
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction, bound, require_modelled
from engines.planning.engine_cost_models import ENGINE_COST_MODELS
from engines.planning.machine import Machine
from engines.planning.memory import Peak
from engines.planning.memory_request import SYSTEM_BYTES, demand, longest
from engines.planning.simulator import PlacedModel, Simulator
from engines.planning.threads import on_threads
from engines.planning.workload import Lengths
from harness.api import DTYPE_BYTES, Dtype, HardwareProfile, HarnessError, InfeasibleError, ModelShape, OffloadPolicy

#: Matrices of a layer that come before its attention: queries, keys and values.
BEFORE_ATTENTION = 3
#: Tiles of weights in a pass that are simulated one by one; those of larger models are simulated in larger pieces.
_TILES = 256
#: Sequences that a plan has room for.
_MOST = 1024


class HostPlanner:
    """Predictions for one model, job and machine without a device; our engine only.

    `requests`: how many; None for as many as the engine itself takes to be enough. `each`: their lengths, over and
    over, where they differ from `lengths`, their mean. `reserved`: tokens that each may grow to, if not the most of
    these. `budget`: bytes for the model's work, None for all that the system leaves.
    `dtype`: of the weights in the checkpoint.
    """

    def __init__(
        self, shape: ModelShape, lengths: Lengths, profile: HardwareProfile,
        requests: int | None = None, *, each: Sequence[Lengths] = (),
        budget: float | None = None, dtype: Dtype = "bfloat16", reserved: int | None = None,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.lengths = lengths
        self.profile = profile
        self.style = ENGINE_COST_MODELS["offload"]
        self._requests = requests
        self._each = each or [lengths]
        self._found: dict[OffloadPolicy, PlacedModel] = {}
        self._dtype = dtype
        self._reserved = reserved
        self._budget = int(budget if budget is not None else profile.host.memory - SYSTEM_BYTES)
        if self._budget <= 0:
            short = -self._budget
            raise InfeasibleError(
                f"infeasible on {profile.name}: the system alone takes {SYSTEM_BYTES:,.0f} bytes of the host's "
                f"{profile.host.memory:,.0f}",
                {"host": short},
            )

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy itself, if it fits. Of more sequences than `_MOST` no plan is made: a host's products are at their
        best rate long before."""
        if policy.block_size > _MOST:
            return None
        try:
            found = self._placed(policy)
        except InfeasibleError:
            return None
        return policy if found.on_disk <= self.profile.disk.capacity else None

    def placed(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with the fractions that the engine would realise. Raises InfeasibleError as it does."""
        found = self._placed(policy)
        whole = sum(tile.nbytes for tile in found.tiles)
        on_disk = sum(b.nbytes for b, streamed in zip(found.tiles, found.streamed, strict=True) if streamed) / whole
        return replace(
            policy,
            weights=(0.0, 1 - on_disk, on_disk),
            cache=policy.cache or (0.0, 1.0, 0.0),
            activations=policy.activations or (0.0, 1.0, 0.0),
        )

    def estimate(self, policy: OffloadPolicy) -> Prediction:
        """In closed form. Raises InfeasibleError for a policy that does not fit."""
        closed_form = ClosedFormPlanner(self.shape, self.lengths, self._profile_for(policy), "offload")
        realised = self.placed(policy)
        if policy.schedule == "sweep":
            realised = replace(realised, gpu_batch_size=self._placed(policy).plan.sequences)
        found = closed_form.predict(realised)
        # the closed form's device is what multiplies: here the host, which attends too
        used = {"host": found.used["device"] + found.used["host"], "disk": found.used["disk"]}
        return replace(found, used=used, bottleneck=max(used, key=lambda name: used[name]))

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """By running the job in virtual time. Raises InfeasibleError for a policy that does not fit."""
        found = self._placed(policy)
        machine = Machine(self._profile_for(policy))
        simulator = Simulator(found, policy, machine, BEFORE_ATTENTION)
        count = self._requests or found.plan.sequences * steady_blocks(policy)
        requests = list(itertools.islice(itertools.cycle(self._each), count))
        sequences = sequences_of(requests)
        simulator.run(sequences)
        whole = max(s.times[-1] for s in sequences)
        prefill, block = _of_sweep(sequences) if policy.schedule == "sweep" else _of_blocks(sequences, policy)
        timeline = simulator.timeline
        busy = timeline.tasks["task_products"] + timeline.tasks["task_attention"]
        return Prediction(
            requests=count,
            together=found.plan.sequences,
            throughput_tok_s=sum(r.generated for r in requests) / whole,
            prefill_s=prefill,
            decode_s=whole - prefill,
            block_latency_s=block,
            bottleneck="host" if busy > timeline.load_s else "disk",
            bound=bound(self.shape, self.lengths, policy, machine, found.plan.sequences),
            peak=Peak(0.0, float(found.plan.total_bytes), float(found.on_disk)),
            used={"host": busy, "disk": timeline.load_s},
            trace=timeline.trace(),
        )

    def lacking(self, prediction: Prediction) -> Mapping[str, float]:
        """Bytes that the disk is short of: what does not fit the memory is not placed."""
        short = prediction.peak.disk - self.profile.disk.capacity
        return {"disk": short} if short > 0 else {}

    def _profile_for(self, policy: OffloadPolicy) -> HardwareProfile:
        """The machine with the threads of a policy."""
        host = self.profile.host
        return self.profile if policy.threads is None else replace(self.profile, host=on_threads(host, policy.threads))

    def _placed(self, policy: OffloadPolicy) -> PlacedModel:
        require_modelled(policy)
        if policy.compute_dtype not in ("auto", self.profile.host.dtype):
            rates = f"hardware {self.profile.name} has rates in {self.profile.host.dtype}"
            raise HarnessError(f"policy.compute_dtype {policy.compute_dtype}: {rates}")
        if policy not in self._found:
            threads = policy.threads or self.profile.host.cores
            self._found[policy] = placed(self.shape, policy, self._each, self._budget, threads, self._dtype,
                                         self.profile.host.dtype, self._reserved)  # fmt: skip
        return self._found[policy]


def placed(
    shape: ModelShape, policy: OffloadPolicy, requests: Sequence[Lengths], budget: int | None, threads: int,
    dtype: Dtype, compute_dtype: Dtype, reserved: int | None = None,
) -> PlacedModel:  # fmt: skip
    """What the engine would place where for such requests within `budget` bytes, if each may grow to `reserved`
    tokens. Raises InfeasibleError as it does."""
    layers, outside, cache = storages(dtype, policy)
    tiles, experts = _pieces(shape, layers, outside)
    kernel = compute_dtype == "float32"
    wanted = demand(
        shape, tiles, cache, compute_dtype, requests, reserved=reserved,
        cast_bytes=0 if kernel or policy.weight_bits == 16 else 4 + DTYPE_BYTES[compute_dtype],
        attention=attention_memory(shape, reserved or longest(requests), threads),
    )  # fmt: skip
    return PlacedModel(shape, tiles, cache, plan_host_memory(wanted, policy, budget), experts)


@lru_cache(maxsize=64)
def _pieces(shape: ModelShape, layers: Storage, outside: Storage) -> tuple[Sequence[WeightTile], frozenset[str]]:
    """The tiles of a model whose layers and whose other matrices are stored so, and which matrices are experts'."""
    matrices = matrices_of(shape)
    how = [layers if m.in_layer else outside for m in matrices]
    tiles = tiles_of(matrices, how)
    if len(tiles) > _TILES:
        tiles = tiles_of(matrices, how, sum(m.rows * m.columns for m in matrices) // _TILES)
    return tiles, frozenset(m.name for m in matrices if m.expert is not None)


def _of_blocks(sequences: Sequence[SimulatedSequence], policy: OffloadPolicy) -> tuple[float, float]:
    """Seconds of prompts, of all blocks that follow each other, and of the block in the middle as a whole."""
    size = policy.block_size
    blocks = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    ends = [0.0, *(max(s.times[-1] for s in block) for block in blocks)]
    prefill = sum(max(s.times[0] for s in block) - began for block, began in zip(blocks, ends, strict=False))
    return prefill, statistics.median(after - before for before, after in itertools.pairwise(ends))


def _of_sweep(sequences: Sequence[SimulatedSequence]) -> tuple[float, float]:
    """No seconds of prompts alone, and those of a sequence from its admission, for which the first one's prompt stands
    in."""
    return 0.0, statistics.median(s.times[-1] - s.times[0] for s in sequences) + sequences[0].times[0]


def sequences_of(requests: Sequence[Lengths]) -> list[SimulatedSequence]:
    """Requests as numbers; no two begin alike."""
    return [SimulatedSequence([i + 1] * r.prompt, r.generated) for i, r in enumerate(requests)]
