"""How a pipeline is divided, as far as plans need to know it too, without torch: the order of its ranks, stages of
ranks that are alike, groups of sequences, and bytes on the wire."""

from itertools import accumulate

from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.partition import shortest_stages
from harness.api import HarnessError, ModelShape

#: Values that share a scale in eight bits: a few channels of a language model's hidden states are far larger than the
#: others.
GROUP = 64


def order_of(ranks: int) -> list[int]:
    """The ranks in the order of their stages."""
    return [*range(1, ranks), 0]


def even_ends(shape: ModelShape, ranks: int) -> list[int]:
    """Where each stage ends, in layers, so that the one with most weights has as few as possible; the head counts as a
    part of a layer. Raises HarnessError where a stage would have no layer."""
    if ranks > shape.num_layers:
        raise HarnessError(
            f"policy.pipeline: {ranks} stages for {shape.num_layers} layers; each needs one, so use at most as many"
        )
    head = shape.head_params / shape.params_per_layer
    sums = [*accumulate([1.0] * (shape.num_layers - 1) + [1.0 + head], initial=0.0)]
    return shortest_stages(shape.num_layers, ranks, lambda _, first, last: sums[last] - sums[first])


def group_count(ranks: int, blocks: int, longest: int, batch: int, streams: bool) -> int:
    """How many groups of sequences are under way: one for each rank, where each gets the blocks of a sequence of
    `longest` tokens and one of `batch` sequences.

    Where weights stream, a stage reads its own for each group's pass: as often as one machine would read all of them
    for one pass of everybody. One group then has all ranks read at the same time, each its part, ahead of the pass.
    """
    if streams:
        return 1
    return max(1, min(ranks, batch, blocks // blocks_for(longest)))


def int8_bytes(width: int) -> int:
    """Bytes of a row of so many values in eight bits, with a float32 scale for each GROUP of them."""
    return width + 4 * -(-width // GROUP)
