"""What a layer's attention does beyond causal softmax, and the reference implementation in torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """What attention does with a layer's scores.

    `window`: a token sees itself and the `window` - 1 tokens before it. `softcap` c: a score s becomes c * tanh(s / c).
    `sinks` [heads] float32: one extra score per head in the softmax's denominator, with no value (gpt-oss).
    `value_topk`: the fraction of visible values, rounded up, that a row takes, those of the largest probabilities
    (FlexGen, section 5, sparse attention). Unlike FlexGen's, they are then scaled up to the sum of all probabilities.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    value_topk: float = 1.0

    def visible(self, first: int, rows: int, seen: int, device: torch.device | None = None) -> torch.Tensor:
        """The mask bool [rows, seen]: which of `seen` tokens each of `rows` tokens from position `first` on sees."""
        mask = torch.ones(rows, seen, dtype=torch.bool, device=device).tril(first)
        return mask if self.window is None else mask.triu(first - self.window + 1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [heads, rows, dim], at positions from `first` on, to key and value [kv_heads, seen, dim].

    Returns [heads, rows, dim] in the query's dtype and their log-sum-exps, float32 [heads, rows]; for a row that sees
    nothing zero and minus infinity. Holds the scores of one key/value head at a time.
    """
    heads, rows, _ = query.shape
    group = heads // key.shape[0]
    mask = spec.visible(first, rows, key.shape[1], query.device)
    out = query.new_empty(heads, rows, value.shape[2])
    lse = out.new_empty(heads, rows, dtype=torch.float32)
    for i, (k, v) in enumerate(zip(key.to(query.dtype), value.to(query.dtype), strict=True)):
        group_heads = slice(i * group, (i + 1) * group)
        scores = query[group_heads] @ k.T * spec.scale
        if spec.softcap is not None:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks[group_heads].to(scores.dtype).view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat([scores, sinks], -1)
        lse[group_heads] = scores.logsumexp(-1).float() if scores.shape[-1] else -torch.inf
        probabilities = scores.softmax(-1)[..., : len(k)]
        if spec.value_topk < 1:
            probabilities = _top_values(probabilities, spec, first)
        out[group_heads] = probabilities @ v
    return out, lse


def _top_values(probabilities: torch.Tensor, spec: AttentionSpec, first: int) -> torch.Tensor:
    """Probabilities [heads, rows, seen] of rows from position `first` on: the largest of each row rescaled, else 0."""
    limit = spec.window or first + probabilities.shape[1]
    sees = torch.arange(first + 1, first + 1 + probabilities.shape[1], device=probabilities.device).clamp(max=limit)
    counts = (spec.value_topk * sees.double()).ceil().view(-1, 1)
    ranks = probabilities.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    kept = probabilities.where(ranks < counts, 0)
    return kept * (probabilities.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
