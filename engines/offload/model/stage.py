"""A part of a model's layers: what is cut from transformers' module so that the rest runs as one stage of a pipeline.

Layers outside the stage keep their place in the list, without parameters: the one before it hands on what the stage
before has sent, and the one after it ends the pass. So the module's own code still calls each layer as it would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.api import UnsupportedError


@dataclass(frozen=True)
class Stage:
    """Layers `first` to `last` - 1 of `layers`."""

    first: int
    last: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last


class StageEnd(Exception):
    """No error, but how a pass leaves a model in the middle: what the last layer of a stage returned, [1, tokens,
    hidden]."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass
class LayerFlow:
    """What a whole model's dry pass tells of its layers: how each returns its hidden states, and whether one gets
    anything else from another. `outside_before` and `outside_after`: matrices outside of layers, by where they are
    used."""

    returned: int = 0  # the length of a layer's tuple; 0 where it returns the tensor itself
    other: str = ""  # what else a layer takes from an earlier one, or empty
    outside_before: frozenset[str] = frozenset()
    outside_after: frozenset[str] = frozenset()
    _made: dict[int, int] = field(default_factory=dict)  # by the id of a layer's output, the layer
    _kept: list[Any] = field(default_factory=list)  # the outputs, so that ids stay theirs

    def watch(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """Watches the layers until the function that it returns is called."""
        hooks: list[Any] = []
        for i, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(self._enters(i), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._leaves(i)))

        def end() -> None:
            for hook in hooks:
                hook.remove()
            self._made.clear()
            self._kept.clear()

        return end

    def require(self, kind: str) -> None:
        """Raises UnsupportedError for a model whose layers hand on more than hidden states."""
        if self.other:
            raise UnsupportedError(f"policy.pipeline: {kind} cannot be cut between layers: {self.other}")

    def output(self, hidden: torch.Tensor) -> Any:
        """Hidden states in the form in which the model's layers return them."""
        return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden

    def _enters(self, number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            named = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
            named.pop("argument 0" if args else "hidden_states", None)
            for name, value in named.items():
                for tensor in _tensors(value):
                    if id(tensor) in self._made:
                        self.other = f"layer {number} takes {name} from layer {self._made[id(tensor)]}"

        return hook

    def _leaves(self, number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            self.returned = len(output) if isinstance(output, tuple) else 0
            for tensor in _tensors(output):
                self._made[id(tensor)] = number
                self._kept.append(tensor)

        return hook


def cut(layers: Sequence[nn.Module], stage: Stage, flow: LayerFlow, received: Callable[[], torch.Tensor]) -> None:
    """Leaves the stage's layers as they are; `received` gives the hidden states [1, tokens, hidden] that enter it."""

    def hand_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return flow.output(hidden_states)

    def receive(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return flow.output(received())

    def end(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(hidden_states)

    for i, layer in enumerate(layers):
        if stage.first <= i < stage.last:
            continue
        layer._modules.clear()
        layer._parameters.clear()
        layer._buffers.clear()
        layer.forward = receive if i == stage.first - 1 else end if i == stage.last else hand_on


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in _tensors(each)] if isinstance(value, list | tuple) else []
