"""A dry pass: what a model asks for, in which order, and whether the engine can serve it."""

from collections.abc import Mapping, Sequence

import torch

from engines.offload.kernels import AttentionSpec
from engines.offload.weights.gemm import padded_output
from harness.api import ModelShape


class DryPass:
    """Serves a model zeros of the right shapes as products and attention, and notes what it asks for."""

    def __init__(self, outputs: Mapping[str, int]) -> None:
        self._outputs = outputs
        self.order: list[str] = []
        self.attends: list[int] = []  # of each attention, how many matrices were used before it
        self.has_windows = False
        self._layers: list[int] = []
        self._shapes: set[tuple[int, ...]] = set()

    def problem(self, shape: ModelShape, logits: torch.Tensor) -> str:
        """Why the engine cannot serve a model that did this and returned `logits` for one row; empty if it can."""
        if unused := set(self._outputs) - set(self.order):
            return f"{min(unused)} is not used in every pass"
        if len(self.order) != len(self._outputs):
            return "a matrix is used twice in a pass"
        if sorted(self._layers) != list(range(shape.num_layers)):
            return (
                f"{len(self._layers)} attention calls reached the hook, {shape.num_layers} layers should make one each"
            )
        kv = (shape.num_kv_heads, shape.head_dim)
        expected = (shape.num_heads, shape.head_dim, *kv, *kv)
        if self._shapes != {expected}:
            return f"its heads (query, key, value: number and width) are {sorted(self._shapes)}, not {expected}"
        if tuple(logits.shape) != (1, shape.vocab):
            return f"one row gave logits {list(logits.shape)} instead of {[1, shape.vocab]}"
        return ""

    def gemm(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.order.append(matrix)
        return padded_output(len(x), self._outputs[matrix], x).zero_()

    def route_experts(self, stacks: Sequence[str], experts: Sequence[int], count: int) -> Sequence[int]:
        return range(count)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self._layers.append(layer)
        self.has_windows |= spec.window is not None
        self.attends.append(len(self.order))
        self._shapes.add(tuple(n for t in (query, key, value) for n in (t.shape[0], t.shape[2])))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
