"""Activations elsewhere between layers: a layer returns a placeholder, and the next layer gets the real tensor.

A batch's residual stream leaves at the end of a layer and comes back at the start of the next, while the other batches
of the pass finish that layer. It frees little memory, because the rows of all batches meet again in the next product;
it does exactly what a policy with activations in host memory or on disk asks for.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from greenlet import getcurrent
from torch import nn

from engines.offload.model.kept_activations import Activations

#: What a batch's greenlet hands to the executor when it pauses.
PAUSED = object()


def pause() -> None:
    """Lets the other batches of the pass come as far; called inside a batch's greenlet, which stops for it."""
    getcurrent().parent.switch(PAUSED)


#: The current batch's activations; each batch runs in a greenlet, and so in a context, of its own.
_kept: ContextVar[tuple[Any, torch.Size]] = ContextVar("kept")


class ActivationOffload:
    """Has the rows that leave each of `layers` but the last kept by `activations` until the next layer begins, those
    that a policy's shares in host memory and on disk say. `rows` and `rows_on_disk` count what passed."""

    def __init__(self, layers: Sequence[nn.Module], activations: Activations, share_on_disk: float) -> None:
        self._activations = activations
        self._share_on_disk = share_on_disk
        self.direct = activations.direct
        self.rows = self.rows_on_disk = 0
        self._hooks = [layer.register_forward_hook(self._save_output) for layer in layers[:-1]]
        self._hooks += [layer.register_forward_pre_hook(self._load_input, with_kwargs=True) for layer in layers[1:]]

    def close(self) -> None:
        """Removes the hooks and frees the disk space. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._activations.close()

    def reset(self) -> None:
        """Drops what a pass that failed has written."""
        self._activations.reset()

    def _save_output(self, layer: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        self.rows += hidden.shape[1]
        self.rows_on_disk += round(self._share_on_disk * hidden.shape[1])
        _kept.set((self._activations.write(hidden[0]), hidden.shape))
        placeholder = torch.empty_like(hidden, device="meta")
        return (placeholder, *output[1:]) if isinstance(output, tuple) else placeholder

    def _load_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        pause()  # before the read: a module holds its hook's arguments until the hook returns
        kept, shape = _kept.get()
        hidden = self._activations.read(kept).view(shape)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}
