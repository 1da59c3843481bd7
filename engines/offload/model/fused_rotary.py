"""Has the attention modules of transformers' module rotate queries and keys by one kernel, those that compute what it
does."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from engines.offload.kernels.rotary import Rotary, can_rotate

#: What the methods of attention modules call for it: a function of their own source file.
_NAME = "apply_rotary_pos_emb"
#: Tokens, and an even size of heads that fills no vector, of random values on which it is compared with the kernel.
_TOKENS, _DIM = 5, 46


def fuse_rotary(module: nn.Module, rotary: Rotary, dtype: torch.dtype) -> tuple[int, int]:
    """Replaces the forward methods of attention modules by copies that call `rotary`; returns of how many, and how many
    modules go on with a function of their own.

    Architectures differ in which columns they rotate with which, and in what they round. So a method is copied if the
    function that it calls gives `rotary`'s values in `dtype` to the last bit; what `rotary` cannot take, such as a part
    of each head's columns, still goes to that function.
    """
    copies: dict[type, FunctionType | None] = {}  # by the modules' type
    fused = left = 0
    for each in module.modules():
        kind = type(each)
        own = _function_of(kind.forward)
        if own is None:
            continue
        if kind not in copies:
            copies[kind] = _with(rotary, own, kind.forward) if _is_same(rotary, own, dtype) else None
        if (forward := copies[kind]) is not None:
            each.forward = MethodType(forward, each)
            fused += 1
        else:
            left += 1
    return fused, left


def _function_of(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """What a method rotates by; None where it does not."""
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return None
    own: Callable[..., Any] | None = forward.__globals__.get(_NAME)
    return own


def _with(rotary: Rotary, own: Callable[..., Any], forward: Callable[..., Any]) -> FunctionType:
    """A method that differs from `forward` in what it rotates by: `rotary`, and `own` where that cannot."""
    assert isinstance(forward, FunctionType)

    def rotate(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        fits = len(given) == 4 and not named and can_rotate(*given)
        return rotary(*given) if fits else own(*given, **named)

    copy = FunctionType(
        forward.__code__, {**forward.__globals__, _NAME: rotate}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _is_same(rotary: Rotary, own: Callable[..., Any], dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 3, _TOKENS, _DIM), (1, 2, _TOKENS, _DIM), (1, _TOKENS, _DIM), (1, _TOKENS, _DIM)
    operands = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    with torch.inference_mode():
        if not can_rotate(*operands):
            return False
        try:
            found = own(*operands)
        except Exception:  # it takes something else
            return False
        return all(map(torch.equal, found, rotary(*operands)))
