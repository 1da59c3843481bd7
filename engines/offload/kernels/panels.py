"""Weights in panels (storage.Panels), to and from rows: the reference of csrc/panel_product.h's layout."""

import torch

from engines.offload.memory.storage import PANEL


def pack(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows [rows, columns] to panels [panels, pairs, PANEL, 2]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, columns % 2, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack(panels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `pack` was given, as [rows, columns]."""
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:rows, :columns]
