"""Workloads that time kernels, for the kernel table (`python -m engines.offload.kernels`) and for calibration."""

import time
from collections.abc import Callable, Mapping

import torch

from engines.offload.kernels.attention import AttentionMetadata, AttentionSpec
from engines.offload.kernels.kernel_sets import HostKernels
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Storage

Work = Callable[[], object]
#: Columns of a head in the attention workload.
DIM = 64


def attention_of_one_token(
    stored: Storage, sequences: int, heads: int, kv_heads: int, context: int, kernels: HostKernels
) -> Work:
    """Attention of one new token per sequence to `context` cached ones, on blocks in random order."""
    kernel = kernels.attention(stored)
    each = context // BLOCK_SIZE
    repeated = kernels.quantizer(stored).pack(torch.randn(64, 2, kv_heads, BLOCK_SIZE, DIM))
    blocks = LayerBlocks(repeated.repeat(-(-sequences * each // 64), 1, 1, 1, 1))
    table = torch.randperm(sequences * each, dtype=torch.int32).view(sequences, each)
    metadata = AttentionMetadata.of([1] * sequences, [context - 1] * sequences, table)
    query, spec = torch.randn(heads, sequences, DIM), AttentionSpec(DIM**-0.5)
    return lambda: kernel(query, blocks, metadata, spec)


def seconds_of(work: Work, rounds: int) -> list[float]:
    """Seconds of each round, after a warm-up round."""
    return interleaved({"": work}, rounds)[""]


def interleaved(work: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each workload per round; a round runs all in turn, and a warm-up round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds + 1):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            if i:
                seconds[name].append(time.perf_counter() - began)
    return seconds
