"""Weights of routers, whose product with a row does not depend on the rows that come with it."""

from typing import Any

import torch
from torch import nn


class RowByRow(torch.Tensor):
    """A weight [outputs, columns]. A library's product of a row may depend on how many rows it is called with, in its
    last bits, which may choose another expert; one of a batch of products of a single row each does not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's linear, by its names of arguments."""
    rows = input.reshape(-1, 1, input.shape[-1])
    transposed = weight.as_subclass(torch.Tensor).t()
    product = torch.bmm(rows, transposed.expand(len(rows), -1, -1))
    product = product.view(*input.shape[:-1], len(weight))
    return product if bias is None else product + bias
