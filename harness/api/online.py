"""The contract of engines that take requests while they run: submit, cancel, step, and the events of a step.

One thread calls an engine. Times are seconds on the engine's own clock, which `clock` reads and which counts from
`load`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from harness.api.engine import Engine, GenerationRequest, GenerationResult, TokenLogprob


@dataclass(frozen=True)
class TokenEvent:
    """A request has a new token, at `time_s`. Its log-probability is there if the request wants `logprobs`."""

    id: str
    token: int
    time_s: float
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class FinishedEvent:
    """A request has ended: all its tokens, with times on the engine's clock. No event of it follows."""

    result: GenerationResult


@dataclass(frozen=True)
class RefusedEvent:
    """A request cannot be run, for a `reason` of one line; the engine serves on. No event of it follows.

    `invalid`: no engine could run it with this model. `infeasible`: this engine cannot within its limits.
    """

    id: str
    reason: str
    kind: Literal["invalid", "infeasible"]


Event = TokenEvent | FinishedEvent | RefusedEvent


@dataclass(frozen=True)
class KVStoreStats:
    """Of a store of past requests' KV blocks, by tier (`host`, `disk`), since `load`.

    `blocks` are those stored now. `hit_tokens`: tokens whose keys and values were read instead of computed.
    `evictions`: blocks that were dropped; from host memory, where no disk could take them. `recomputed_tokens`: stored
    ones that were faster to compute than to read. `problem`: why nothing more is stored on disk, or empty.
    """

    blocks: Mapping[str, int]
    hit_tokens: Mapping[str, int]
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]
    evictions: Mapping[str, int]
    recomputed_tokens: int
    problem: str


@dataclass(frozen=True)
class OnlineStats:
    """What an engine does now, and counts since `load`.

    `waiting` and `running` requests are those of `pending`. KV blocks are counted by tier (`device`, `host`, `disk`:
    those that the engine has). `prefix_hit_tokens`: prompt tokens that were not computed since a cache had their keys
    and values. `preemptions`: how often a running request lost its KV blocks to an older one. `pass_s`: seconds that
    all `passes` took together, for `rows` tokens, and `task_s` by what was at work, as far as the engine knows; tasks
    overlap. `between_passes_s`: seconds between two passes in which nothing computed, though a request waited.
    `kv_store`: where the engine has one.
    """

    waiting: int
    running: int
    kv_blocks_used: Mapping[str, int]
    kv_blocks_total: Mapping[str, int]
    prefix_hit_tokens: int
    preemptions: int
    passes: int
    pass_s: float
    kv_store: KVStoreStats | None = None
    rows: int = 0
    task_s: Mapping[str, float] = field(default_factory=dict)
    between_passes_s: float = 0.0


@runtime_checkable
class OnlineEngine(Engine, Protocol):
    """An engine that takes requests while it runs. Its `generate` is a loop over `submit` and `step`.

    A request gets the tokens that it would get alone, as far as the engine is reproducible.
    """

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; its arrival is now, whatever `arrival_s` says.

        What is wrong with it, `step` tells by a RefusedEvent. Ids are unique among pending requests.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a pending request: the next step gives back its memory and one FinishedEvent with `finish_reason`
        "cancelled" and the tokens so far, the only event that follows. Ignores ids that are not pending."""

    def step(self) -> list[Event]:
        """Forms and runs one pass; returns what it led to, the tokens of a request before its end.

        Empty at once where nothing is pending: a step never sleeps. Raises as `generate` does where the engine itself
        fails; then no request can go on.
        """

    def pending(self) -> int:
        """How many requests are queued or running: those whose last event `step` has not returned."""

    def clock(self) -> float:
        """Now, on the engine's clock: seconds since `load` by `time.monotonic`, or of simulated time."""

    def stats(self) -> OnlineStats:
        """What the engine does now and has done since `load`."""
