"""One batch of a pass: the model runs over it in a greenlet, which stops where it must wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet

from engines.offload.device.protocol import Device, Event
from engines.offload.kv_cache.attention import AttentionTask
from engines.offload.loaded_model import LoadedModel
from engines.offload.model.activation_offload import PAUSED
from engines.offload.model.layer_products import PackedBatch
from engines.offload.timeline import AWAITING, BETWEEN


@dataclass(frozen=True)
class Attending:
    """The attention that a batch waits for while it runs beside other batches' products."""

    task: AttentionTask
    launched: Event

    def wait(self, device: Device) -> torch.Tensor:
        device.wait_event(self.launched)
        return self.task.wait()


class RunningBatch:
    """One batch of a pass: the greenlet that runs the `model` over it, and the reason for which it has stopped.

    `stopped_for` is a GemmRequest, an Attending or PAUSED, and holds the logits once the model has returned.
    """

    def __init__(self, loaded: LoadedModel, model: Callable[[PackedBatch], torch.Tensor], batch: PackedBatch) -> None:
        self._greenlet = greenlet(model)
        self._device = loaded.device
        self._timeline = loaded.timeline
        self.stopped_for: Any = None
        self.answer: Any = batch  # the value to resume the greenlet with; None while it must wait

    def resume(self, stop_at_attention: bool) -> None:
        """Resumes the batch, if it has an answer: up to its next matrix, or only to its attention."""
        began = self._timeline.begin()
        if isinstance(self.stopped_for, Attending):
            self.answer = self.stopped_for.wait(self._device)
            self._timeline.end("compute", AWAITING, began)
            began = self._timeline.begin()
        if self.answer is None:
            return
        self.stopped_for = self._greenlet.switch(self.answer)
        if isinstance(self.stopped_for, Attending) and not stop_at_attention:
            self.stopped_for = self._greenlet.switch(self.stopped_for.wait(self._device))
        self.answer = None
        self._timeline.end("compute", BETWEEN, began)

    def resume_paused(self) -> None:
        """Resumes the batch from a pause, once the other batches have reached it too; alone it may pause again."""
        while self.stopped_for is PAUSED:
            began = self._timeline.begin()
            self.stopped_for = self._greenlet.switch()
            self._timeline.end("compute", BETWEEN, began)

    def abandon(self) -> None:
        """Waits for a running attention, since its KV blocks may soon belong to another sequence. Raises as it."""
        if isinstance(self.stopped_for, Attending):
            self.stopped_for.wait(self._device)
