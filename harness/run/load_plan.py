"""Which request of a load is due next: arrivals by the clock, turns after their answers, users of a closed loop."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.api import Conversation, GenerationRequest, SamplingParams

#: Conversations that are drawn ahead of time, so that drawing one never makes a request late.
_AHEAD = 32


@dataclass
class Session:
    """A conversation as far as it went: its next turn, and all tokens before it."""

    conversation: Conversation
    round: int = 0
    history: tuple[int, ...] = ()
    due_s: float = 0.0
    sent_s: float = 0.0

    @property
    def id(self) -> str:
        """The id of the next turn's request."""
        only = len(self.conversation.turns) == 1
        return self.conversation.id if only else f"{self.conversation.id}.{self.round}"

    def request(self) -> GenerationRequest:
        """The next turn, with all before it; decoded greedily to the exact length."""
        turn = self.conversation.turns[self.round]
        sampling = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True)
        return GenerationRequest(self.id, self.history + turn.prompt, sampling, self.due_s)


@dataclass
class LoadPlan:
    """What is still to be sent. Not thread-safe.

    Conversations begin when they arrive, or with `users` when a user is free; after `count` of them, or `window_s`
    seconds, none begins. What has begun is finished.
    """

    conversations: Iterator[Conversation]
    users: int | None = None
    count: int | None = None
    window_s: float = math.inf
    _ahead: deque[Conversation] = field(default_factory=deque)
    _due: list[tuple[float, int, Session]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _asked: int = 0  # requests without an answer yet

    def __post_init__(self) -> None:
        self.conversations = itertools.islice(self.conversations, self.count)
        self._refill(_AHEAD)
        for _ in range(1 if self.users is None else self.users):
            self._begin(0.0)

    def next_due(self) -> float | None:
        """When the next request is due, in seconds since the load began; None while only answers can lead to one."""
        return self._due[0][0] if self._due else None

    def take(self, now_s: float) -> Session:
        """Removes the request that is due first; it is sent at `now_s`."""
        _, _, session = heapq.heappop(self._due)
        session.sent_s = now_s
        self._asked += 1
        return session

    def sent(self, session: Session) -> None:
        """It is on its way: only now the next arrival is drawn, which takes a moment."""
        if self.users is None and session.round == 0:
            self._begin(0.0)

    def answered(self, session: Session, at_s: float, tokens: Sequence[int]) -> None:
        """Its answer was there at `at_s`: schedules the next turn, or the next conversation of a closed loop's user.

        Where a server does not tell ids (-1), others stand for them in the history.
        """
        self._asked -= 1
        turns = session.conversation.turns
        if session.round + 1 == len(turns):
            self._ended(at_s)
            return
        turn, rng = turns[session.round], random.Random(session.id)
        answer = tuple(token if token >= 0 else rng.choice(turn.prompt) for token in tokens)
        following = Session(session.conversation, session.round + 1, session.history + turn.prompt + answer)
        self._push(following, at_s + turns[following.round].think_s)

    def dropped(self, session: Session, at_s: float) -> None:
        """It was refused: its conversation ends."""
        self._asked -= 1
        self._ended(at_s)

    def end(self, at_s: float) -> None:
        """No conversation begins after `at_s`; those that were due by then, sent or not, are finished."""
        self.window_s = min(self.window_s, at_s)
        self._due = [due for due in self._due if due[2].round or due[0] < self.window_s]
        heapq.heapify(self._due)

    @property
    def done(self) -> bool:
        """Whether everything was sent and answered."""
        return not self._due and not self._asked

    def _ended(self, at_s: float) -> None:
        """A conversation ended: in a closed loop its user begins the next."""
        if self.users is not None:
            self._begin(at_s)

    def _begin(self, at_s: float) -> None:
        """Schedules the next conversation: at its arrival, or in a closed loop at `at_s`."""
        self._refill()
        if not self._ahead:
            return
        due_s = self._ahead[0].arrival_s if self.users is None else at_s
        if due_s < self.window_s:
            self._push(Session(self._ahead.popleft()), due_s)

    def _push(self, session: Session, due_s: float) -> None:
        session.due_s = due_s
        heapq.heappush(self._due, (due_s, next(self._order), session))

    def _refill(self, count: int = 1) -> None:
        self._ahead.extend(itertools.islice(self.conversations, count))
