"""What ranks send each other, over torch.distributed: passes from the leader to all, hidden states along the stages,
sums and logits among those that each have a part of every matrix.

Sends do not wait for whoever receives. A rank that is lost is named.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.pipeline.clocks import Offset, offset
from engines.offload.pipeline.wire import Wire
from harness.api import HarnessError, first_line

#: Sends that may be under way before the next one waits for the first.
_SENDS = 64
#: How long a rank may take for the hidden states of one pass before it counts as lost, in seconds.
PATIENCE_S = 600.0
_FOREVER = timedelta(days=365)
#: Numbers of an announcement that travel in its first message, as all of a pass with some dozen decoding sequences do.
#: A second one arrives two delays of the link later, as its receiver says first that it waits for it.
_HEAD = 1024
#: Tags: passes with their hidden states; and what these must not be taken for while passes are under way: answers, and
#: the parts of sums and logits.
_PASSES, _ANSWERS, _PARTS = range(3)
#: Messages there and back by which two clocks are compared.
_EXCHANGES = 20


class Command(IntEnum):
    """What the leader tells: a pass, the end, that a run begins; and asks: what a rank did, what its clock shows."""

    PASS, END, BEGIN, REPORT, CLOCK = range(5)


class LostRankError(HarnessError):
    """A rank is gone, or its link is."""


class Links:
    """The connections of rank `rank` of those in `order`, which is that of their stages.

    Hidden states travel as `wire` has them. One thread receives and one sends, perhaps others than each other.
    """

    def __init__(self, rank: int, order: Sequence[int], wire: Wire, patience_s: float = PATIENCE_S) -> None:
        self.rank, self.followers = rank, sorted(order)[1:]
        self._others = sorted(set(order) - {rank})
        self._wire = wire
        self._patience = timedelta(seconds=patience_s)
        stage = order.index(rank)
        self._before, self._after = order[stage - 1], order[(stage + 1) % len(order)]
        self._sends: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._lock = threading.Lock()
        self.bytes_sent = 0  # of hidden states, sums and logits

    def announce(self, command: Command, numbers: torch.Tensor | None = None) -> None:
        """From the leader to all others, int32 `numbers`."""
        for rank in self.followers:
            self._tell(rank, command, numbers)

    def announced(self) -> tuple[Command, torch.Tensor]:
        """What the leader announces next, however long that takes. Raises LostRankError."""
        head = torch.empty(_HEAD, dtype=torch.int32)
        self._receive(head, 0, _FOREVER)
        command, count = head[:2].tolist()
        inline = head[2 : 2 + count]
        if count <= len(inline):
            return Command(command), inline
        rest = torch.empty(count - len(inline), dtype=torch.int32)
        self._receive(rest, 0, self._patience)
        return Command(command), torch.cat([inline, rest])

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Hidden states [rows, width] in host memory to the next stage."""
        raw = self._wire.packed(hidden)
        self._send(raw, self._after)
        self.bytes_sent += len(raw)

    def receive_hidden(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width], from the stage before. Raises LostRankError."""
        raw = torch.empty(self._wire.nbytes(rows, width), dtype=torch.uint8)
        self._receive(raw, self._before, self._patience)
        return self._wire.unpacked(raw, rows, width)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the `part` [rows, outputs] of every rank: each adds up a slice of it and sends that to the others,
        so 2 (N - 1) / N of the part leave each of N ranks (NanoFlow, equation 7, for two sums a layer).

        In float32 and in the order of the ranks wherever a value lies, which the sums of torch.distributed are not: the
        sum of a row does not depend on what rows are beside it. Raises LostRankError.
        """
        if not part.numel():
            return part
        flat, slices = part.flatten(), self._slices(part.numel())
        own = flat[slices[self.rank]]
        parts = {rank: own if rank == self.rank else torch.empty_like(own) for rank in slices}
        self._exchange(
            {rank: flat[slices[rank]] for rank in self._others}, {rank: parts[rank] for rank in self._others}
        )
        total = torch.zeros_like(own, dtype=torch.float32)
        for rank in slices:
            total += parts[rank]
        summed = torch.empty_like(flat)
        summed[slices[self.rank]] = total.to(part.dtype)
        own = summed[slices[self.rank]]
        self._exchange(dict.fromkeys(self._others, own), {rank: summed[slices[rank]] for rank in self._others})
        return summed.view(part.shape)

    def gather(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        """[rows, outputs] on the leader, of the parts [rows, ...] of their columns that the ranks have one after the
        other; elsewhere the `part` itself. Raises LostRankError."""
        if not part.numel():
            return part.new_empty(len(part), outputs)
        if self.rank:
            self._exchange({0: part.contiguous()}, {})
            return part
        widths = self._slices(outputs)
        parts = {k: part.new_empty(len(part), widths[k].stop - widths[k].start) for k in self._others}
        self._exchange({}, parts)
        return torch.cat([part, *parts.values()], dim=1)

    def answer(self, values: Sequence[float]) -> None:
        """From a follower to the leader, who asked for it."""
        self._send(torch.tensor([len(values)]), 0, _ANSWERS)
        self._send(torch.tensor(values, dtype=torch.float64), 0, _ANSWERS)

    def query(self, rank: int, command: Command, values: Sequence[float] = ()) -> list[float]:
        """What a rank answers the leader, who tells it `values`. Raises LostRankError."""
        self._tell(rank, command, torch.tensor(values, dtype=torch.float64).view(torch.int32) if values else None)
        count = torch.empty(1, dtype=torch.long)
        self._receive(count, rank, self._patience, _ANSWERS)
        answer = torch.empty(int(count.item()), dtype=torch.float64)
        self._receive(answer, rank, self._patience, _ANSWERS)
        return [float(value) for value in answer]

    def clock(self, rank: int) -> Offset:
        """How far a rank's clock is from the leader's. Raises LostRankError."""
        exchanges = []
        for _ in range(_EXCHANGES):
            sent = time.perf_counter()
            [answered] = self.query(rank, Command.CLOCK)
            exchanges.append((sent, answered, time.perf_counter()))
        return offset(exchanges)

    def _tell(self, rank: int, command: Command, numbers: torch.Tensor | None) -> None:
        body = torch.empty(0, dtype=torch.int32) if numbers is None else numbers
        head = torch.zeros(_HEAD, dtype=torch.int32)
        head[0], head[1] = int(command), len(body)
        inline = body[: _HEAD - 2]
        head[2 : 2 + len(inline)] = inline
        self._send(head, rank)
        if len(body) > len(inline):
            self._send(body[len(inline) :].contiguous(), rank)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int = _PASSES) -> None:
        with self._lock:
            while self._sends and (len(self._sends) >= _SENDS or self._sends[0][0].is_completed()):
                work, _, to = self._sends.popleft()
                self._wait(work, to, self._patience)
            work = self._begun(dist.isend, tensor, rank, tag)
            self._sends.append((work, tensor, rank))  # held until it is sent

    def _receive(self, into: torch.Tensor, rank: int, patience: timedelta, tag: int = _PASSES) -> None:
        self._wait(self._begun(dist.irecv, into, rank, tag), rank, patience)

    def _exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Sends to ranks and receives from ranks at the same time, until all is done."""
        works = [(self._begun(dist.irecv, tensor, rank, _PARTS), rank) for rank, tensor in received.items()]
        works += [(self._begun(dist.isend, tensor, rank, _PARTS), rank) for rank, tensor in sent.items()]
        for work, rank in works:
            self._wait(work, rank, self._patience)
        self.bytes_sent += sum(tensor.nbytes for tensor in sent.values())

    def _slices(self, length: int) -> dict[int, slice]:
        """The parts of so many things, by rank."""
        count = len(self._others) + 1
        shards = {rank: TensorShard(rank, count).of(length) for rank in range(count)}
        return {rank: slice(shard.start, shard.stop) for rank, shard in shards.items()}

    def _begun(self, operation: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int) -> Any:
        try:
            return operation(_bytes(tensor), rank, tag=tag)
        except RuntimeError as exc:
            raise self._lost(rank, exc) from exc

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
