"""How a layer attends beyond being causal, and the definition of it in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """What attention does with a layer's scores.

    `window`: a token sees itself and the `window` - 1 before it. `softcap` c: a score s becomes c * tanh(s / c).
    `sinks` [heads] float32: a score in each head's softmax that belongs to no token (gpt-oss). `value_topk`: the part
    of the values it sees, rounded up, that a row takes: those with the largest probabilities (FlexGen, section 5,
    sparse attention). They grow to the sum that all probabilities had, which FlexGen's do not.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    value_topk: float = 1.0

    def visible(self, first: int, rows: int, seen: int, device: torch.device | None = None) -> torch.Tensor:
        """Whether each of `rows` tokens from position `first` on sees each of `seen` tokens: bool [rows, seen]."""
        mask = torch.ones(rows, seen, dtype=torch.bool, device=device).tril(first)
        return mask if self.window is None else mask.triu(first - self.window + 1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, first: int
) -> torch.Tensor:
    """Attention of query [heads, rows, dim] at positions from `first` on to key, value [kv_heads, seen, dim].

    Returns [heads, rows, dim] in the query's dtype. Scores of one key/value head at a time are held.
    """
    return attend_with_lse(query, key, value, spec, first)[0]


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the logarithms float32 [heads, rows] of the sums that probabilities are of: minus infinity where a
    row sees nothing, whose output is zero."""
    heads, rows, _ = query.shape
    group = heads // key.shape[0]
    mask = spec.visible(first, rows, key.shape[1], query.device)
    out = query.new_empty(heads, rows, value.shape[2])
    lse = out.new_empty(heads, rows, dtype=torch.float32)
    for i, (k, v) in enumerate(zip(key.to(query.dtype), value.to(query.dtype), strict=True)):
        own = slice(i * group, (i + 1) * group)
        scores = query[own] @ k.T * spec.scale
        if spec.softcap is not None:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks[own].to(scores.dtype).view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat([scores, sinks], -1)
        lse[own] = scores.logsumexp(-1).float() if scores.shape[-1] else -torch.inf
        probabilities = scores.softmax(-1)[..., : len(k)]
        if spec.value_topk < 1:
            probabilities = _largest(probabilities, spec, first)
        out[own] = probabilities @ v
    return out, lse


def _largest(probabilities: torch.Tensor, spec: AttentionSpec, first: int) -> torch.Tensor:
    """The probabilities [heads, rows, seen] of rows from position `first` on that they take values for, and zeros."""
    limit = spec.window or first + probabilities.shape[1]
    sees = torch.arange(first + 1, first + 1 + probabilities.shape[1], device=probabilities.device).clamp(max=limit)
    counts = (spec.value_topk * sees.double()).ceil().view(-1, 1)
    ranks = probabilities.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    kept = probabilities.where(ranks < counts, 0)
    return kept * (probabilities.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
