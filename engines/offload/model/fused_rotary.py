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


def fuse_rotary(module: nn.Module, rotary: Rotary, dtype: torch.dtype) -> int:
    """Replaces the forward methods of attention modules by copies that call `rotary`; returns of how many.

    Architectures differ in which columns they rotate with which, and in what they round. So a method is copied if the
    function that it calls gives `rotary`'s values in `dtype` to the last bit; what `rotary` cannot take, such as a part
    of each head's columns, still goes to that function.
    """
    copies: dict[type, FunctionType | None] = {}  # by the modules' type
    fused = 0
    for each in module.modules():
        kind = type(each)
        if kind not in copies:
            copies[kind] = _with(rotary, dtype, kind.forward)
        if (forward := copies[kind]) is not None:
            each.forward = MethodType(forward, each)
            fused += 1
    return fused


def _with(rotary: Rotary, dtype: torch.dtype, forward: Callable[..., Any]) -> FunctionType | None:
    """A method that differs from `forward` in what it rotates by; None where nothing is to be replaced."""
    own = getattr(forward, "__globals__", {}).get(_NAME)
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names or own is None:
        return None
    if not _is_same(rotary, own, dtype):
        return None

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
