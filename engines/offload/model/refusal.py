"""Refuses a model by its configuration alone: builds it on the meta device and runs two tokens through zeros."""

from pathlib import Path

import torch

from engines.offload.model.meta_model import MetaModel
from harness.api import ModelShape


def refuse(folder: Path, shape: ModelShape) -> None:
    """Raises UnsupportedError, with the reason, for an architecture that the engine cannot run."""
    MetaModel(folder, shape, torch.float32)
