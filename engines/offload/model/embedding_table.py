"""Embeddings that stay in their stored dtype, and in their file, until a row is looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engines.offload.device.protocol import Device


class Table(torch.Tensor):
    """An embedding in its stored dtype that gives its rows, and itself out, as of the compute dtype.

    So whatever a model does with what it looked up, such as scaling it, is done in the compute dtype, and on the
    device where there is one.
    """

    _as: torch.dtype
    _device: Device | None

    @staticmethod
    def of(stored: torch.Tensor, dtype: torch.dtype, device: Device | None = None) -> torch.Tensor:
        """`stored` itself where it has that dtype, and no device wants its rows."""
        if stored.dtype == dtype and device is None:
            return stored
        table = stored.as_subclass(Table)
        table._as = dtype
        table._device = device
        return table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            table = args[1]
            rows = nn.functional.embedding(args[0], table.as_subclass(torch.Tensor), *args[2:], **(kwargs or {}))
            return rows.to(table._as) if table._device is None else table._device.upload(rows.to(table._as))
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0]._as
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
