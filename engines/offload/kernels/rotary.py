"""Rotary position embeddings of queries and keys in one call, where torch needs sixteen."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engines.offload.kernels.build import CSRC, function
from engines.offload.kernels.launch import launch

#: query [1, heads, tokens, dim], key [1, kv_heads, tokens, dim] and cos, sin [1, tokens, dim] -> the query and the key,
#: rotated. For tensors that `can_rotate`.
Rotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: Dtypes that the compiled kernel takes.
_DTYPES = (torch.float32, torch.bfloat16)


def can_rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel takes these: of one dtype, whole heads, as Rotary has their shapes."""
    if query.dim() != 4 or key.dim() != 4:
        return False
    (sequences, _, *rest), (key_sequences, _, *key_rest) = query.shape, key.shape
    return (
        query.dtype in _DTYPES
        and query.dtype == key.dtype == cos.dtype == sin.dtype
        and sequences == key_sequences == 1
        and rest == key_rest
        and cos.shape == sin.shape == (1, *rest)
        and rest[1] % 2 == 0
        and query.stride(3) == key.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def compiled_rotary(cache: Path) -> Rotary:
    """x * cos + (-second half of x, first half of x) * sin for query and key; each product is rounded to their dtype,
    and the sum is. On as many threads as torch has. Raises NoCompilerError where it cannot be built.

    Source: RoFormer (Su et al. 2021), equation 34, with the halves of a head in place of its even and odd columns.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [*[pointer, number, number] * 2, *[pointer] * 4, *[number] * 4, ctypes.c_int]
    kernels = {
        dtype: function(CSRC / "rotary.cpp", f"rotate_{str(dtype).removeprefix('torch.')}", arguments, cache)
        for dtype in _DTYPES
    }

    def bind(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: torch.Tensor,
        rotated_key: torch.Tensor,
    ) -> Callable[[], None]:  # fmt: skip
        _, heads, tokens, dim = query.shape
        return partial(
            kernels[query.dtype],
            query.data_ptr(), query.stride(1), query.stride(2), key.data_ptr(), key.stride(1), key.stride(2),
            cos.data_ptr(), sin.data_ptr(), rotated.data_ptr(), rotated_key.data_ptr(), heads, key.shape[1], tokens,
            dim, torch.get_num_threads(),
        )  # fmt: skip

    def rotary(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (_, heads, tokens, dim), kv_heads = query.shape, key.shape[1]
        rotated, rotated_key = (
            torch.empty_strided((1, n, tokens, dim), (n * tokens * dim, dim, n * dim, 1), dtype=query.dtype)
            for n in (heads, kv_heads)
        )
        launch(bind, query, key, cos, sin, rotated, rotated_key)
        return rotated, rotated_key

    return rotary
