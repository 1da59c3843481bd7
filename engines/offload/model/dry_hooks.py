"""The functions registered with transformers for the dry pass: they refuse what the engine's attention cannot do.

What a model's layers ask of attention is the same in every pass, so it is checked in that one only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from engines.offload.model.hooks import attention_hook
from harness.api import UnsupportedError

DRY_RUN = "offload-dry"
#: Keywords that attention layers pass on: those that the engine knows, and those without effect in a packed batch.
_KNOWN = frozenset({*signature(attention_hook).parameters, "position_ids", "cache_position", "dropout"})


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


def _checked_attention_hook(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: _Mask | None,
    **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Called by transformers as `attention_hook` is. Raises UnsupportedError."""
    kind = type(module).__name__
    unknown = sorted(k for k, v in named.items() if k not in _KNOWN and v is not None and not isinstance(v, bool))
    if not getattr(module, "is_causal", True) or named.get("is_causal") is False:
        raise UnsupportedError(f"{kind} attends to later tokens; engine offload attends causally")
    if unknown:
        raise UnsupportedError(f"{kind} asks attention for {', '.join(unknown)}, which engine offload lacks")
    if named.get("offload_attention") is None:
        raise UnsupportedError(f"{kind} does not pass its caller's arguments on to attention")
    if attention_mask is not None and not attention_mask.is_window(named.get("sliding_window")):
        raise UnsupportedError(f"{kind} asks for a mask that is neither causal nor the window it names")
    return attention_hook(module, query, key, value, attention_mask, **named)


def _mask_to_check(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> _Mask:
    """In the dry pass masks are checked; no mask is made."""
    return _Mask(mask_function)


AttentionInterface.register(DRY_RUN, _checked_attention_hook)
#: None for OFFLOAD: attention knows by itself who sees whom, and transformers makes no mask for names that it has none
#: of.
AttentionMaskInterface.register(DRY_RUN, _mask_to_check)
