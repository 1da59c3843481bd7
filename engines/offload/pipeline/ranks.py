"""All ranks as the leader sees them: what they tell each other before passes begin, and who is lost."""

import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.offload.backend.base import LoadRequest
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.model.stage import Stage
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.pulse import LOST_S, Pulses
from engines.offload.pipeline.rates import Machine, MeasuredRates
from engines.offload.pipeline.wire import Wire
from harness.api import HarnessError, InfeasibleError, from_json, to_json

#: How long a rank may take to start, and to measure or load its stage, in seconds.
START_S, LOAD_S = 300.0, 24 * 3600.0
#: How long the leader listens for why a rank was lost, in seconds; and for a process to be dead, whose connections
#: closed before.
_REASON_S, _DEATH_S = 6.0, 1.0
_LOOK_S = 0.05
#: What a rank needs to know of a job.
_JOB_FIELDS = ("scratch", "cache", "max_sequence", "mean_sequence", "mean_new", "reproducible")


@dataclass(frozen=True)
class Loaded:
    """What a rank has loaded, as far as all must agree: KV blocks, sequences that run, prompt tokens of a pass, and
    whether weights stream."""

    blocks: int
    sequences: int
    chunk: int
    streams: bool

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Loaded":
        """That of this rank."""
        plan = loaded.plan
        return cls(loaded.cache.num_blocks, plan.sequences, plan.chunk, bool(loaded.stream.tiles))


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: a HarnessError or, with the bytes that it `lacks` by tier, an InfeasibleError."""

    reason: str
    infeasible: bool = False
    lacks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, error: HarnessError) -> "Failure":
        """That of an error."""
        if isinstance(error, InfeasibleError):
            return cls(str(error), True, error.lacking)
        return cls(str(error))

    def encoded(self) -> str:
        """As text."""
        return json.dumps(to_json(self))

    def error(self, who: str) -> HarnessError:
        """The error of a rank, `who` it is."""
        words = f"{who}: {self.reason}"
        return InfeasibleError(words, self.lacks) if self.infeasible else HarnessError(words)


@dataclass
class Ranks:
    """All ranks of a model, as the leader sees them. `children` are those that it started, by rank."""

    count: int
    store: Any
    children: Mapping[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    machines: Sequence[Machine] = ()  # by rank
    order: Sequence[int] = ()  # those that have a stage, in the order of these

    def __post_init__(self) -> None:
        self._pulses = Pulses(self.store)

    def alike(self, request: LoadRequest) -> bool:
        """Whether nothing tells one rank's machine from another's, for this load."""
        return bool(self.children) or len({machine.under(request) for machine in self.machines}) == 1

    def shares_clock(self, rank: int) -> bool:
        """Whether a rank reads the leader's own clock."""
        theirs, own = self.machines[rank].clock, self.machines[0].clock
        return bool(self.children) or (theirs == own and theirs != "")

    def tell(self, request: LoadRequest, measure: bool) -> None:
        """Tells each rank what is to be loaded, and whether to measure its rates. All compute in the policy's dtype."""
        job = {name: getattr(request.job, name) for name in _JOB_FIELDS}
        message = {"model": request.model, "policy": request.policy, "limits": request.limits, "job": job}
        self.store.set("job", json.dumps(to_json(message | {"measure": measure})))

    def rates(self) -> list[MeasuredRates | None]:
        """What each other rank has measured. Raises HarnessError for one that cannot, naming it."""
        rates: list[MeasuredRates | None] = []
        for rank in range(1, self.count):
            self.wait_for(f"rates/{rank}", rank, LOAD_S)
            measured = json.loads(self.store.get(f"rates/{rank}"))
            rates.append(None if measured is None else from_json(MeasuredRates, measured))
        return rates

    def assign(self, request: LoadRequest, stages: Mapping[int, Stage]) -> LoadRequest:
        """Tells each rank its stage, by rank in the order of stages; returns what the leader loads."""
        self.order = list(stages)
        self.store.set("stages", json.dumps(to_json(list(stages.items()))))
        return replace(request, stage=stages[0], shard=TensorShard.under(request.policy, 0))

    def links(self, wire: Wire) -> Links:
        """The leader's."""
        return Links(0, self.order, wire)

    def agree(self, own: Loaded) -> Loaded:
        """What all ranks can do, once all have loaded. Raises HarnessError for one that cannot, naming it."""
        loaded = [own]
        for rank in self.order[:-1]:
            self.wait_for(f"loaded/{rank}", rank, LOAD_S)
            loaded.append(from_json(Loaded, json.loads(self.store.get(f"loaded/{rank}"))))
        return Loaded(
            min(one.blocks for one in loaded),
            min(one.sequences for one in loaded),
            min(one.chunk for one in loaded),
            any(one.streams for one in loaded),
        )

    def wait_for(self, key: str, rank: int, patience_s: float) -> None:
        """Until the rank has set the key. Raises HarnessError where it takes too long, or as `_require_all`."""
        deadline = time.monotonic() + patience_s
        while not self.store.check([key]):
            self._require_all()
            if time.monotonic() > deadline:
                raise HarnessError(f"rank {rank} of {self.count} did not answer for {patience_s:g} s")
            time.sleep(_LOOK_S)

    def _require_all(self) -> None:
        """Raises HarnessError, or InfeasibleError, where any rank has failed, died or shows no sign of life."""
        others = self.order[:-1] or range(1, self.count)
        for rank in others:
            if failure := self._failure(rank):
                raise failure.error(f"rank {rank} of {self.count}")
        if died := self.died():
            raise HarnessError(f"all ranks have ended: {died}")
        for rank in () if self.children else others:
            if self._pulses.silent_s(rank) > LOST_S:
                raise HarnessError(f"rank {rank} of {self.count} gave no sign of life for {LOST_S:g} s")

    def died(self) -> str:
        """Which of the processes that the leader started has died by itself, and of what; empty where none has."""
        for rank, child in self.children.items():
            code = child.poll()
            if code is not None and code < 0:
                return f"rank {rank} died of {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} ended with exit code {code}"
        return ""

    def why_lost(self) -> str:
        """Why all ranks ended, as far as anybody knows: a process died, a rank gave a reason of its own, or else
        whom some rank lost."""
        began = time.monotonic()
        while True:
            if (died := self.died()) and "SIG" in died:
                return died
            said = {rank: failure.reason for rank in self.order[:-1] if (failure := self._failure(rank))}
            if own := [rank for rank, reason in said.items() if not reason.startswith("lost ")]:
                return f"rank {own[0]} failed: {said[own[0]]}"
            all_said = len(said) >= max(1, len(self.order) - 2)
            if time.monotonic() - began > (_DEATH_S if all_said else _REASON_S):
                return next(iter(said.values()), died)
            time.sleep(_LOOK_S)

    def _failure(self, rank: int) -> Failure | None:
        """Why a rank ended, by itself; None where it has not."""
        key = f"failed/{rank}"
        return from_json(Failure, json.loads(self.store.get(key))) if self.store.check([key]) else None
