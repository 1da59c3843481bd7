"""Merges attention to two parts of a context: the reference, on any device."""

from collections.abc import Callable

import torch


def merge_attention_states(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> torch.Tensor:
    """Merges attention to two parts of a context, outputs [rows, heads, dim] with log-sum-exps [rows, heads].

    At most one log-sum-exp of a row may be minus infinity. Source: FlashAttention (Dao et al. 2022), section 3.1.
    """
    maximum = torch.maximum(lse, other_lse)
    weight, other_weight = ((part - maximum).exp()[..., None] for part in (lse, other_lse))
    return ((out * weight + other * other_weight) / (weight + other_weight)).to(out.dtype)


#: As merge_rows.
RowMerger = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def merge_rows(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merges another part's attention into `rows` int64 [n] of `out` [tokens, heads, dim], in place: `other`
    [n, heads, dim], with log-sum-exps `other_lse` [n, heads] beside `lse` [tokens, heads], both float32. As
    merge_attention_states, by torch on any device: the reference."""
    out.index_copy_(0, rows, merge_attention_states(out[rows], lse[rows], other.to(out.dtype), other_lse))
