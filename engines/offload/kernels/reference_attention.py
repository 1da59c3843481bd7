"""Attention over the paged KV cache in torch: the reference for compiled kernels, and the fallback without them."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.offload.kernels.attention import AttentionKernel, AttentionMetadata, AttentionSpec
from engines.offload.kernels.layer_blocks import KVBlocks
from engines.offload.kernels.quantizer import Quantizer
from engines.offload.memory.storage import Storage
from harness.api import ModelShape


def reference_attention(quantizer: Quantizer) -> AttentionKernel:
    """The reference in torch, segment by segment; by torch's fused attention where the spec allows it."""

    def dequantized(stored: torch.Tensor, seen: int, like: torch.Tensor) -> torch.Tensor:
        """Blocks [n, kv_heads, block, ...] as values [kv_heads, seen, dim] in the query's dtype."""
        rows = stored.transpose(0, 1).flatten(1, 2)[:, :seen]
        packed = stored.dtype == torch.uint8
        dtype = torch.float32 if packed else like.dtype
        out = torch.empty(rows.shape[0] * seen, like.shape[2], dtype=dtype, device=like.device)
        quantizer.unpack(rows.flatten(0, 1).contiguous(), out)
        return out.view(rows.shape[0], seen, like.shape[2]).to(like.dtype)

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        start = 0
        for i, (first, count) in enumerate(zip(metadata.before, metadata.counts, strict=True)):
            rows, seen = slice(start, start + count), first + count
            start += count
            keys, values = blocks.gather(metadata.block_table[i].long()).unbind(1)
            operands = query[:, rows], dequantized(keys, seen, query), dequantized(values, seen, query)
            if lse is None and spec.softcap is None and spec.sinks is None and spec.value_topk >= 1:
                attended = _fused(*operands, spec, first)
            else:
                attended, segment_lse = attend(*operands, spec, first)
                if lse is not None:
                    lse[rows] = segment_lse.T
            out[rows] = attended.transpose(0, 1)
        return out

    return attention


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, first: int
) -> torch.Tensor:
    rows, seen = query.shape[1], key.shape[1]
    causal = not first and (spec.window is None or spec.window >= seen)
    mask = None if causal else spec.visible(first, rows, seen, query.device)
    grouped = key.shape[0] != query.shape[0]
    return scaled_dot_product_attention(
        query[None], key[None], value[None], mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
    )[0]


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
    of_kept = kept.sum(-1, keepdim=True)
    growth = probabilities.sum(-1, keepdim=True) / of_kept
    return kept * growth.where(of_kept != 0, 0)  # a sink may outweigh all


def reference_memory(
    shape: ModelShape, longest: int, stored: Storage, compute_bytes: int, sparse: bool
) -> tuple[int, int]:
    """The reference's working memory in bytes, fixed and per prompt row; see KernelSet.attention_memory.

    Fixed: one sequence's keys and values as stored, in float32 and in the compute dtype. Per row: scores, a mask, and
    for sparse values two sort orders of the scores.
    """
    values = shape.num_kv_heads * (stored.row_bytes(shape.head_dim) + shape.head_dim * (4 + compute_bytes))
    of_score = 3 * compute_bytes + (2 * 8 + compute_bytes if sparse else 0)  # a softmax, beside a copy with sinks
    scores = shape.num_heads // shape.num_kv_heads * of_score
    return longest * 2 * values, longest * (scores + compute_bytes + 2)
