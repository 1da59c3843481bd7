"""Activations on disk between layers: a layer returns a placeholder, and the next layer gets the real tensor.

A batch's residual stream is written at the end of a layer and read at the start of the next, while the other batches of
the pass finish that layer. Where the host computes this frees little memory, because the rows of all batches meet again
in the next product; it does exactly what a policy with activations on disk asks for.
"""

import mmap
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent
from torch import nn

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import aligned
from engines.offload.timeline import Timeline
from harness.common.buffers import direct_buffer


@dataclass(frozen=True)
class _Saved:
    """A batch's activations: the first rows in a slot of the file, the others in memory."""

    slot: int
    on_disk: int
    in_memory: torch.Tensor
    shape: torch.Size


#: The current batch's activations; each batch runs in a greenlet, and so in a context, of its own.
_saved: ContextVar[_Saved] = ContextVar("saved")


#: What a batch's greenlet hands to the executor when it pauses.
PAUSED = object()


def pause() -> None:
    """Lets the other batches of the pass come as far; called inside a batch's greenlet, which stops for it."""
    getcurrent().parent.switch(PAUSED)


class ActivationOffload:
    """Keeps a part `share` of the rows that leave each of `layers` but the last on disk until the next layer begins.

    Room is for `batches` batches of `rows` rows of `row_bytes` bytes. `rows` and `rows_on_disk` count what passed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        share: float,
        batches: int,
        rows: int,
        row_bytes: int,
        folder: Path,
        timeline: Timeline,
        throttle: Throttle,
    ) -> None:
        self._share = share
        self._slot_bytes = aligned(rows * row_bytes)
        self._batches = batches
        self._free = list(range(batches))
        self._timeline = timeline
        self._file = DiskFile(folder, batches * self._slot_bytes, "activations", throttle)
        self.direct = self._file.direct
        self._memory = memoryview(direct_buffer(max(self._slot_bytes, mmap.PAGESIZE)))
        self.rows = self.rows_on_disk = 0
        self._hooks = [layer.register_forward_hook(self._save_output) for layer in layers[:-1]]
        self._hooks += [layer.register_forward_pre_hook(self._load_input, with_kwargs=True) for layer in layers[1:]]

    def close(self) -> None:
        """Removes the hooks and frees the disk space. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def reset(self) -> None:
        """Drops what a pass that failed has written."""
        self._free = list(range(self._batches))

    def _save_output(self, layer: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        _saved.set(self._write(hidden))
        placeholder = torch.empty_like(hidden, device="meta")
        return (placeholder, *output[1:]) if isinstance(output, tuple) else placeholder

    def _load_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        pause()  # before the read: a module holds its hook's arguments until the hook returns
        hidden = self._read(_saved.get())
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _write(self, hidden: torch.Tensor) -> _Saved:
        rows = hidden[0]
        count = round(self._share * len(rows))
        self.rows += len(rows)
        self.rows_on_disk += count
        slot = self._free.pop()
        if count:
            data = rows[:count].contiguous().view(torch.uint8).numpy().reshape(-1)
            self._memory[: len(data)] = data.tobytes()
            self._move("write", slot, len(data))
        return _Saved(slot, count, rows[count:].clone(), hidden.shape)

    def _read(self, saved: _Saved) -> torch.Tensor:
        hidden = saved.in_memory.new_empty(saved.shape)
        hidden[0, saved.on_disk :] = saved.in_memory
        if saved.on_disk:
            nbytes = saved.on_disk * hidden.shape[2] * hidden.itemsize
            self._move("read", saved.slot, nbytes)
            data = torch.frombuffer(self._memory, dtype=hidden.dtype, count=nbytes // hidden.itemsize)
            hidden[0, : saved.on_disk] = data.view(saved.on_disk, -1)
        self._free.append(saved.slot)
        return hidden

    def _move(self, what: str, slot: int, nbytes: int) -> None:
        began = time.perf_counter()
        move = self._file.write if what == "write" else self._file.read
        move(self._memory[: aligned(nbytes)], slot * self._slot_bytes)
        self._timeline.add("activations", what, began, time.perf_counter())
