"""The functions registered with transformers in place of its attention, its masks and its mixtures of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from engines.offload.kernels import AttentionSpec
from harness.api import UnsupportedError

OFFLOAD, DRY_RUN = "offload", "offload-dry"
#: Keywords that attention layers pass on and that have no effect in a packed batch.
_HARMLESS = frozenset({"position_ids", "cache_position", "dropout"})


class Attention(Protocol):
    """Computes attention for the tokens of one packed batch."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""


@dataclass(frozen=True)
class _Mask:
    """The mask that a model asks for in the dry pass, to be compared with the window that it tells attention.

    `sees(batch, head, query, key)` says whether a query position sees a key position.
    """

    sees: Callable[..., torch.Tensor]

    def is_window(self, window: int | None) -> bool:
        """Whether the mask is causal and shows a token the last `window` tokens, or all where that is None."""
        width = 1 << 20 if window is None else window
        positions = {q for q in (0, 1, width - 1, width, width + 1, 3 * width) if q >= 0}
        pairs = [(q, k) for q in positions for k in (0, q - width, q - width + 1, q - 1, q, q + 1) if k >= 0]
        zero = torch.tensor(0)
        return all(
            bool(self.sees(zero, zero, torch.tensor(q), torch.tensor(k)))
            == (k <= q and (window is None or k > q - window))
            for q, k in pairs
        )


def _attention_hook(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    offload_attention: Attention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every attention layer with query, key and value [1, heads, tokens, dim]."""
    kind = type(module).__name__
    unknown = sorted(k for k, v in others.items() if k not in _HARMLESS and v is not None and not isinstance(v, bool))
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedError(f"{kind} attends to later tokens; engine offload attends causally")
    if unknown:
        raise UnsupportedError(f"{kind} asks attention for {', '.join(unknown)}, which engine offload lacks")
    if offload_attention is None:
        raise UnsupportedError(f"{kind} does not pass its caller's arguments on to attention")
    if attention_mask is not None and not attention_mask.is_window(sliding_window):
        raise UnsupportedError(f"{kind} asks for a mask that is neither causal nor the window it names")
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, sinks)
    return offload_attention.attend(module.layer_idx, query[0], key[0], value[0], spec)[None], None


def _experts_hook(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Called by transformers for a mixture of experts."""
    return torch.as_tensor(module.offload_experts(hidden, index, share))


def _mask_to_check(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> _Mask:
    """In the dry pass masks are checked; no mask is made."""
    return _Mask(mask_function)


ALL_EXPERTS_FUNCTIONS.register(OFFLOAD, _experts_hook)
for _name in (OFFLOAD, DRY_RUN):
    AttentionInterface.register(_name, _attention_hook)
#: None for OFFLOAD: attention knows by itself who sees whom, and transformers makes no mask for names that it has none
#: of.
AttentionMaskInterface.register(DRY_RUN, _mask_to_check)
