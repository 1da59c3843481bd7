"""The functions registered with transformers in place of its attention and its mixtures of experts."""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engines.offload.kernels import AttentionSpec

OFFLOAD = "offload"


class Attention(Protocol):
    """Computes attention for the tokens of one packed batch."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""


def attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    offload_attention: Attention,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every attention layer with query, key and value [1, heads, tokens, dim]. The mask and
    the other keywords have no effect here: see dry_hooks.py."""
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, sinks)
    operands = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    return offload_attention.attend(module.layer_idx, *operands, spec).unsqueeze(0), None


def _experts_hook(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Called by transformers for a mixture of experts."""
    return torch.as_tensor(module.offload_experts(hidden, index, share))


ALL_EXPERTS_FUNCTIONS.register(OFFLOAD, _experts_hook)
AttentionInterface.register(OFFLOAD, attention_hook)
