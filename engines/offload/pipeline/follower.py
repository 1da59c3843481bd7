"""A rank that runs its layers, or its part of all, whenever the leader announces a pass."""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.offload.executor import Executor
from engines.offload.kv_cache.attention import AttentionContext, PackedAttention
from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.loaded_model import LoadedModel
from engines.offload.model.layer_products import PackedBatch
from engines.offload.model.stage import Stage
from engines.offload.pipeline.lane import COMPUTE, SEND, WAIT, Lane
from engines.offload.pipeline.links import Command, Links
from engines.offload.pipeline.messages import PassMessage

#: Passes whose hidden states are received while one is computed.
_AHEAD = 2


@dataclass(frozen=True)
class _Next:
    """What is to be done next, with the hidden states that enter it; `failure` instead where a rank was lost."""

    command: Command = Command.PASS
    message: PassMessage | None = None
    hidden: torch.Tensor | None = None
    window: tuple[float, ...] = ()  # of a report
    failure: BaseException | None = None


class Follower:
    """Runs passes of a `loaded` stage. Of a stage with all layers, which is a part of every matrix, nothing is handed
    on: the leader has its part of the logits by then."""

    def __init__(self, loaded: LoadedModel, links: Links, stage: Stage) -> None:
        self._loaded, self._links, self._stage = loaded, links, stage
        self._executor = Executor(loaded)
        self._attention = AttentionContext(
            cache=loaded.cache, kernel=loaded.attention, kernel_beside=loaded.attention_beside,
            timeline=loaded.timeline, device=loaded.device, run=self._executor.attend,
            value_topk=loaded.policy.value_sparsity, hadamard=loaded.hadamard, first_layer=stage.first,
        )  # fmt: skip
        loaded.meta_model.use_collectives(links)
        self._inbox: queue.Queue[_Next] = queue.Queue(_AHEAD)
        self._lane = Lane()
        self._moved = (0, 0)  # bytes sent and bytes of weights read, when the run began

    def run(self) -> None:
        """Until the leader ends. Raises LostRankError, and whatever a pass raises."""
        threading.Thread(target=self._receive, name="pipeline-inbox", daemon=True).start()
        while True:
            began = time.perf_counter()
            item = self._inbox.get()
            if item.failure is not None:
                raise item.failure
            match item.command:
                case Command.END:
                    return
                case Command.BEGIN:
                    self._lane.clear()
                    self._moved = self._bytes()
                case Command.REPORT:
                    self._report(*item.window)
                case Command.CLOCK:
                    self._links.answer([time.perf_counter()])
                case Command.PASS:
                    assert item.message is not None
                    received = time.perf_counter()
                    out = self._pass(item.message, item.hidden)
                    computed = time.perf_counter()
                    if not self._stage.is_last:
                        self._links.send_hidden(out)
                    self._lane.add(WAIT, began, received)
                    self._lane.add(COMPUTE, received, computed)
                    self._lane.add(SEND, computed, time.perf_counter())

    def _receive(self) -> None:
        """Receives what the leader announces, and hidden states for it, ahead of the passes."""
        width = self._loaded.model.shape.hidden
        try:
            while True:
                command, numbers = self._links.announced()
                message: PassMessage | None = None
                hidden: torch.Tensor | None = None
                window: tuple[float, ...] = ()
                if command == Command.PASS:
                    message = PassMessage.decoded(numbers)
                    if not self._stage.is_first:
                        hidden = self._links.receive_hidden(sum(message.rows), width)
                if command == Command.REPORT:
                    window = tuple(numbers.view(torch.float64).tolist())
                self._inbox.put(_Next(command, message, hidden, window))
                if command == Command.END:
                    return
        except BaseException as exc:  # else the thread that computes would wait for ever
            self._inbox.put(_Next(failure=exc))

    def _pass(self, message: PassMessage, hidden: torch.Tensor | None) -> torch.Tensor:
        """The hidden states [rows, hidden] that leave the stage, in host memory; the last stage's are of no use."""
        loaded = self._loaded
        loaded.check_tables()
        loaded.cache.begin(message.batches)
        with torch.inference_mode():
            out = self._executor.run(self._packed(message, hidden))
            hosted = [loaded.device.download(rows) for rows in out]
            loaded.counts.add_tasks(loaded.timeline.end_pass(sum(message.rows)).tasks)
        return torch.cat(hosted) if len(hosted) > 1 else hosted[0]

    def _packed(self, message: PassMessage, hidden: torch.Tensor | None) -> list[PackedBatch]:
        upload, rows = self._loaded.device.upload, message.rows
        logits = [torch.tensor(indices, dtype=torch.long) for indices in message.logits_indices]
        ids = torch.split(torch.tensor(message.ids, dtype=torch.long), rows)
        entering = [None] * len(rows) if hidden is None else [upload(part) for part in torch.split(hidden, rows)]
        return [
            PackedBatch(
                ids[i], upload(_positions(batch)), upload(logits[i]),
                PackedAttention(self._attention, batch, i), entering[i],
            )
            for i, batch in enumerate(message.batches)
        ]  # fmt: skip

    def _report(self, low: float, high: float) -> None:
        """Answers with seconds at work, bytes sent and bytes of weights read in the run, and the spans between two
        times, each as three numbers."""
        sent, read = (now - before for now, before in zip(self._bytes(), self._moved, strict=True))
        spans = [number for span in self._lane.within(low, high) for number in span]
        self._links.answer([self._lane.busy_s, sent, read, *spans])

    def _bytes(self) -> tuple[int, int]:
        return self._links.bytes_sent, self._loaded.stream.bytes_read


def _positions(batch: Sequence[Chunk]) -> torch.Tensor:
    return torch.cat([torch.arange(chunk.cached, chunk.cached + chunk.count) for chunk in batch])
