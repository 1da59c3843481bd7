"""Pieces of work that measure kernels, for the table of kernels and for calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from engines.offload.kernels.attention import AttentionMetadata
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kernels.host import Kernels
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Storage

Work = Callable[[], object]
#: Columns of a head.
DIM = 64


def attention_of_one_token(
    stored: Storage, sequences: int, heads: int, kv_heads: int, context: int, kernels: Kernels
) -> Work:
    """Attention of one new token of each sequence to `context` cached ones, on blocks in no order."""
    kernel = kernels.attention(stored)
    each = context // BLOCK_SIZE
    one = kernels.quantizer(stored).pack(torch.randn(64, 2, kv_heads, BLOCK_SIZE, DIM))
    blocks = LayerBlocks(one.repeat(-(-sequences * each // 64), 1, 1, 1, 1))
    table = torch.randperm(sequences * each, dtype=torch.int32).view(sequences, each)
    segments = AttentionMetadata.of([1] * sequences, [context - 1] * sequences, table)
    query, spec = torch.randn(heads, sequences, DIM), AttentionSpec(DIM**-0.5)
    return lambda: kernel(query, blocks, segments, spec)


def seconds_of(work: Work, rounds: int) -> list[float]:
    """Seconds of each round; one before them is not counted."""
    return interleaved({"": work}, rounds)[""]


def interleaved(work: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work, in rounds that take all in turn; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds + 1):
        for name, one in work.items():
            began = time.perf_counter()
            one()
            if i:
                found[name].append(time.perf_counter() - began)
    return found
