"""What ranks send each other, over torch.distributed: passes from the leader to all, hidden states along the stages.

Sends do not wait for whoever receives. A rank that is lost is named: whoever misses it notes so in the store, which is
the leader's.
"""

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engines.offload.pipeline.stages import rank_of, stage_of
from harness.api import HarnessError, first_line

#: What the leader announces: a pass, the end, or that each rank shall say what it did.
PASS, END, REPORT = 1, 2, 3
#: Sends that may be under way before the next one waits for the first.
_SENDS = 64
#: How long a rank may take for the hidden states of one pass before it counts as lost, in seconds.
PATIENCE_S = 600.0
#: How long the leader listens for why a rank was lost, in seconds.
_REASON_S = 5.0
_FOREVER = timedelta(days=365)


class LostRankError(HarnessError):
    """A rank of the pipeline is gone, or its link is."""


class Links:
    """The connections of rank `rank` of `ranks`; `store` is shared by all.

    One thread receives and one sends, perhaps others than each other.
    """

    def __init__(self, rank: int, ranks: int, store: Any, patience_s: float = PATIENCE_S) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = store
        self._patience = timedelta(seconds=patience_s)
        stage = stage_of(rank, ranks)
        self._before, self._after = rank_of((stage - 1) % ranks, ranks), rank_of((stage + 1) % ranks, ranks)
        self._sends: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._lock = threading.Lock()
        self.bytes_sent = 0

    def announce(self, what: int, numbers: torch.Tensor | None = None) -> None:
        """From the leader to all others."""
        body = torch.empty(0, dtype=torch.int32) if numbers is None else numbers
        head = torch.tensor([what, len(body)])
        for rank in range(1, self.ranks):
            self._send(head, rank)
            if len(body):
                self._send(body, rank)

    def announced(self) -> tuple[int, torch.Tensor]:
        """What the leader announces next, however long that takes. Raises LostRankError."""
        head = torch.empty(2, dtype=torch.long)
        self._receive(head, 0, _FOREVER)
        body = torch.empty(int(head[1]), dtype=torch.int32)
        if len(body):
            self._receive(body, 0, self._patience)
        return int(head[0]), body

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Hidden states in host memory to the next stage."""
        self._send(hidden.contiguous(), self._after)

    def receive_hidden(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width], from the stage before. Raises LostRankError."""
        hidden = torch.empty(rows, width, dtype=dtype)
        self._receive(hidden, self._before, self._patience)
        return hidden

    def report(self, values: Sequence[float]) -> None:
        """From a follower to the leader, who asked for it."""
        self._send(torch.tensor(values, dtype=torch.float64), 0)

    def reports(self, count: int) -> list[list[float]]:
        """So many values of each other rank, by rank. Raises LostRankError."""
        self.announce(REPORT)
        found = []
        for rank in range(1, self.ranks):
            values = torch.empty(count, dtype=torch.float64)
            self._receive(values, rank, self._patience)
            found.append(values.tolist())
        return found

    def failed(self, reason: str) -> None:
        """Lets the leader know why this rank ends."""
        self._store.set(f"failed/{self.rank}", reason)

    def why_lost(self) -> str:
        """What ranks said before they were gone: a reason of their own first, else whom they lost."""
        keys = [f"failed/{rank}" for rank in range(1, self.ranks)]
        waiting = threading.Event()
        for _ in range(int(_REASON_S / 0.1)):
            said = [(rank, self._said(key)) for rank, key in enumerate(keys, 1)]
            known = [(rank, reason) for rank, reason in said if reason]
            own = [(rank, reason) for rank, reason in known if not reason.startswith("lost ")]
            if own:
                return f"rank {own[0][0]} failed: {own[0][1]}"
            if known and len(known) >= self.ranks - 2:
                break
            waiting.wait(0.1)
        return known[0][1] if known else ""

    def _said(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        with self._lock:
            while self._sends and (len(self._sends) >= _SENDS or self._sends[0][0].is_completed()):
                work, _, to = self._sends.popleft()
                self._wait(work, to, self._patience)
            try:
                work = dist.isend(_bytes(tensor), rank)
            except RuntimeError as exc:
                raise self._lost(rank, exc) from exc
            self._sends.append((work, tensor, rank))  # held until it is sent
            self.bytes_sent += tensor.numel() * tensor.itemsize

    def _receive(self, into: torch.Tensor, rank: int, patience: timedelta) -> None:
        try:
            work = dist.irecv(_bytes(into), rank)
        except RuntimeError as exc:
            raise self._lost(rank, exc) from exc
        self._wait(work, rank, patience)

    def _wait(self, work: Any, rank: int, patience: timedelta) -> None:
        try:
            work.wait(patience)
        except RuntimeError as exc:
            raise self._lost(rank, exc) from exc

    def _lost(self, rank: int, exc: RuntimeError) -> LostRankError:
        words = str(exc)
        if "imed out" in words or "imeout" in words:
            return LostRankError(f"lost rank {rank}: nothing came for {self._patience.total_seconds():g} s")
        if "losed" in words or "reset" in words or "refused" in words:
            return LostRankError(f"lost rank {rank}: it closed the connection")
        return LostRankError(f"lost rank {rank}: {first_line(exc)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor
