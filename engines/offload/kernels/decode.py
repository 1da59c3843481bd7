"""Attention of single queries over the paged cache: the compiled kernel and the reference it is tested against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engines.offload.kernels.build import load
from engines.offload.rule import Rule, attend

#: (query [n, heads, dim], keys, values [pages, kv_heads, page, dim], table [n, max_pages] int32,
#: lengths [n] int32, rule) -> [n, heads, dim]
DecodeKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Rule], torch.Tensor]


def reference_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """The definition, in torch, one sequence at a time, in float32."""
    out = torch.empty_like(query)
    for i, length in enumerate(lengths.tolist()):
        pages = table[i].long()
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length] for c in (keys, values))
        out[i] = attend(query[i].float().unsqueeze(1), k, v, rule, length - 1)[:, 0]
    return out


def compiled_decode(cache: Path, threads: int) -> DecodeKernel:
    """The C++ kernel on `threads` threads, in float32 arithmetic whatever the cache and the queries are in.

    Raises NoCompilerError where it cannot be built.
    """
    library = load(Path(__file__).with_name("decode.cpp"), cache)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions = {
        torch.float32: library.decode_float32,
        torch.bfloat16: library.decode_bfloat16,
        torch.float16: library.decode_float16,
    }
    for function in functions.values():
        function.argtypes = [pointer] * 6 + [number] * 7 + [ctypes.c_float, ctypes.c_float, pointer, ctypes.c_int]
        function.restype = None

    def decode(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        wide = query.float().contiguous()
        assert keys.is_contiguous() and values.is_contiguous() and table.is_contiguous()
        out = torch.empty_like(wide)
        sequences, heads, dim = query.shape
        _, kv_heads, page, _ = keys.shape
        functions[keys.dtype](
            *(t.data_ptr() for t in (wide, keys, values, table, lengths, out)),
            sequences, heads, kv_heads, dim, page, table.shape[1], rule.window or 0, rule.scale, rule.softcap or 0.0,
            None if rule.sinks is None else rule.sinks.data_ptr(), threads,
        )  # fmt: skip
        return out.to(query.dtype)

    return decode
