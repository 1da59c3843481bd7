"""Embeddings that stay in their stored dtype, and in their file, until a row is looked up."""

from typing import Any

import torch
from torch import nn

from engines.offload.device.protocol import Device


class EmbeddingTable(torch.Tensor):
    """Shows itself, and gives its rows, in the compute dtype: whatever a model does with the rows, such as scaling
    them, is done in that dtype, where `_device` computes."""

    _as: torch.dtype
    _device: Device

    @staticmethod
    def of(stored: torch.Tensor, dtype: torch.dtype, device: Device) -> torch.Tensor:
        """`stored` itself where it has that dtype and the host computes."""
        if stored.dtype == dtype and device.where.type == "cpu":
            return stored
        table = stored.as_subclass(EmbeddingTable)
        table._as = dtype
        table._device = device
        return table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            table = args[1]
            rows = nn.functional.embedding(args[0], table.as_subclass(torch.Tensor), *args[2:], **(kwargs or {}))
            return table._device.upload(rows.to(table._as))
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0]._as
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
