"""A rank that runs its layers whenever the leader announces a pass."""

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
from engines.offload.pipeline.links import END, PASS, REPORT, Links
from engines.offload.pipeline.messages import PassMessage
from harness.api import HarnessError

#: Passes whose hidden states are received while one is computed.
_AHEAD = 2
#: What a rank reports, in this order: seconds at work and waiting for hidden states, bytes sent, and read for weights.
REPORTED = ("busy_s", "idle_s", "sent_bytes", "weight_bytes_read")


@dataclass(frozen=True)
class _Next:
    """What is to be done next, with the hidden states that enter it; `failure` instead where a rank was lost."""

    what: int = PASS
    message: PassMessage | None = None
    hidden: torch.Tensor | None = None
    failure: HarnessError | None = None


class Follower:
    """Runs passes of a `loaded` stage."""

    def __init__(self, loaded: LoadedModel, links: Links, is_first: bool, first_layer: int) -> None:
        self._loaded, self._links, self._is_first = loaded, links, is_first
        self._executor = Executor(loaded)
        self._attention = AttentionContext(
            cache=loaded.cache, kernel=loaded.attention, timeline=loaded.timeline, device=loaded.device,
            run=self._executor.attend, value_topk=loaded.policy.value_sparsity, hadamard=loaded.hadamard,
            first_layer=first_layer,
        )  # fmt: skip
        self._inbox: queue.Queue[_Next] = queue.Queue(_AHEAD)
        self._busy_s = self._idle_s = 0.0

    def run(self) -> None:
        """Until the leader ends. Raises LostRankError, and whatever a pass raises."""
        threading.Thread(target=self._receive, name="pipeline-inbox", daemon=True).start()
        while True:
            began = time.perf_counter()
            item = self._inbox.get()
            if item.failure is not None:
                raise item.failure
            if item.what == END:
                return
            if item.what == REPORT:
                self._report()
                continue
            assert item.message is not None
            received = time.perf_counter()
            self._links.send_hidden(self._pass(item.message, item.hidden))
            self._idle_s += received - began
            self._busy_s += time.perf_counter() - received

    def _receive(self) -> None:
        """Receives what the leader announces, and hidden states for it, ahead of the passes."""
        width, dtype = self._loaded.model.shape.hidden, self._loaded.meta_model.dtype
        try:
            while True:
                what, numbers = self._links.announced()
                message = hidden = None
                if what == PASS:
                    message = PassMessage.decoded(numbers)
                    if not self._is_first:
                        hidden = self._links.receive_hidden(sum(message.rows), width, dtype)
                self._inbox.put(_Next(what, message, hidden))
                if what == END:
                    return
        except HarnessError as exc:
            self._inbox.put(_Next(failure=exc))

    def _pass(self, message: PassMessage, hidden: torch.Tensor | None) -> torch.Tensor:
        """The hidden states [rows, hidden] that leave the stage, in host memory."""
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
        ids = torch.split(torch.tensor(message.ids, dtype=torch.long), rows)
        entering = [None] * len(rows) if hidden is None else [upload(part) for part in torch.split(hidden, rows)]
        return [
            PackedBatch(
                ids[i], upload(_positions(batch)), upload(torch.empty(0, dtype=torch.long)),
                PackedAttention(self._attention, batch, i), entering[i],
            )
            for i, batch in enumerate(message.batches)
        ]  # fmt: skip

    def _report(self) -> None:
        read = self._loaded.stream.bytes_read
        self._links.report([self._busy_s, self._idle_s, float(self._links.bytes_sent), float(read)])
        self._busy_s = self._idle_s = 0.0


def _positions(batch: Sequence[Chunk]) -> torch.Tensor:
    return torch.cat([torch.arange(chunk.cached, chunk.cached + chunk.count) for chunk in batch])
