"""Which requests of a job are to be handed out, are out, or are settled: each is settled once, whatever is lost."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.api import GenerationRequest, HarnessError, RefusedEvent

#: How often a shard may end its worker before the rest of it is refused.
MAX_LOSSES = 3
#: Blocks of a shard. The more, the rarer a worker's last sequences run without company; the fewer, the sooner it is
#: known what a lost worker had done.
_BLOCKS = 4


def shard_size(requests: int, workers: int, block: int) -> int:
    """Requests of a shard: at most four blocks of the engine's, and so that all workers get as many shards."""
    rounds = math.ceil(requests / (workers * _BLOCKS * block))
    return math.ceil(requests / (workers * rounds))


@dataclass
class Shard:
    """Requests that a worker gets together, less those that are settled, by id; `losses`: workers lost over them."""

    requests: dict[str, GenerationRequest]
    losses: int = 0


@dataclass
class Ledger:
    """The requests of a job in shards of `size`, in their order."""

    requests: Sequence[GenerationRequest]
    size: int
    _waiting: deque[Shard] = field(default_factory=deque)
    _open: dict[str, Shard] = field(default_factory=dict)  # by request that is not settled
    _settled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for first in range(0, len(self.requests), self.size):
            shard = Shard({request.id: request for request in self.requests[first : first + self.size]})
            self._waiting.append(shard)
            self._open |= dict.fromkeys(shard.requests, shard)

    @property
    def done(self) -> bool:
        """Whether every request is settled."""
        return not self._open

    def take(self) -> Shard | None:
        """A shard to hand out; None where all are out."""
        return self._waiting.popleft() if self._waiting else None

    def settle(self, request: str) -> bool:
        """Whether this answer to a request is its first, the one to write. Raises HarnessError for a request that the
        job does not have."""
        if (shard := self._open.pop(request, None)) is None:
            if request not in self._settled:
                raise HarnessError(f"a worker answered request {request!r}, which the job does not have")
            return False
        del shard.requests[request]
        self._settled.add(request)
        return True

    def give_back(self, shard: Shard, why: str) -> list[RefusedEvent]:
        """Takes back a shard that a worker left unfinished, to be handed out again before any other. After the third
        time what is left of it is refused, and returned, with the last reason."""
        shard.losses += 1
        if not shard.requests:
            return []
        if shard.losses < MAX_LOSSES:
            self._waiting.appendleft(shard)
            return []
        refused = [*shard.requests]
        for request in refused:
            self.settle(request)
        reason = f"a worker was lost over this line or those beside it {MAX_LOSSES} times: {why}"
        return [RefusedEvent(request, reason, "infeasible") for request in refused]
