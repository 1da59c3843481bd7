"""Builds transformers' module of a configuration on the meta device, or says why it cannot be run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engines.common.requests import special_tokens
from engines.offload.model.hooks import DRY_RUN
from harness.api import HarnessError, UnsupportedError, first_line

#: Rotary scalings whose frequencies depend on the longest position of the pass, and so on the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
#: Parameters of more values than this must belong to a linear layer, a mixture or an embedding.
_LARGEST_SMALL = 1 << 22


class _EmptyOnMeta(TorchFunctionMode):
    """Weights take no memory, not even for the moment before `init_empty_weights` frees it: a stack of experts can be
    larger than RAM. Buffers, which are computed, are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def load_config(path: Path) -> Any:
    """The configuration in a model's folder. Raises UnsupportedError for one whose results depend on the batch, or
    whose attention transformers does not let be replaced."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in [parameters, *(v for v in parameters.values() if isinstance(v, Mapping))]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"{config.model_type}: its {rope['rope_type']!r} rotary scaling depends on the batch's longest sequence"
            )
    if not AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
        raise UnsupportedError(f"{config.model_type}: transformers does not allow its attention to be replaced")
    return config


def build_on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The module without weights, its attention set to the dry run's hook. Raises UnsupportedError where transformers
    cannot build it."""
    try:
        with init_empty_weights(), _EmptyOnMeta():
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=DRY_RUN).eval()
    except Exception as exc:  # some check their sizes, some need packages that are not installed
        raise UnsupportedError(f"{config.model_type}: transformers cannot build it: {first_line(exc)}") from exc


def require_small(kind: str, module: Any, small: Mapping[str, tuple[int, ...]]) -> None:
    """Only weights of linear layers and embeddings are streamed: raises UnsupportedError where other parameters are
    large, or buffers have no values."""
    if meta := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise UnsupportedError(f"{kind}: {min(meta)} is left without values")
    for name, shape in small.items():
        if len(shape) > 1 and torch.Size(shape).numel() > _LARGEST_SMALL:
            raise UnsupportedError(f"{kind}: {name} {list(shape)} belongs to no plain linear layer or embedding")


def stop_and_begin_tokens(path: Path, config: Any, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """See engines.common.requests.special_tokens: read where `generate` reads them."""
    try:
        source = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # there is none: the model's configuration tells
        source = config.get_text_config()
    except ValueError as exc:
        raise HarnessError(f"{path / 'generation_config.json'} cannot be read: {first_line(exc)}") from exc
    return special_tokens(source, vocab)
