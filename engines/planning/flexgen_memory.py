"""The memory that FlexGen's code needs on each tier, as constraints that are linear in a policy's fractions.

Source: flex_opt.py and pytorch_backend.py of `flexgen` 0.1.8. The paper's own constraints (Sheng et al. 2023, appendix
A.3) leave out the logits of all positions, decompressed tensors and the copies that attention makes.
"""

from collections.abc import Sequence

from engines.common.work_memory import CONTEXT_BYTES
from engines.planning.memory import ALLOCATED_SHARE, MemoryConstraint
from engines.planning.workload import (
    VALUE_BYTES,
    Fractions,
    Lengths,
    kv_bytes,
    kv_values,
    model_weight_bytes,
    sublayers,
    weight_bytes,
)
from harness.api import ModelShape, OffloadPolicy


def flexgen_constraints(shape: ModelShape, policy: OffloadPolicy, lengths: Lengths) -> Sequence[MemoryConstraint]:
    """The constraints for the policy's batches and bits, whatever its fractions."""
    batch, layers = policy.gpu_batch_size, shape.num_layers
    attention, feed_forward, head = sublayers(shape)
    # the input embedding is a second copy of the head's matrix; both are compressed
    in_layers = model_weight_bytes(shape, policy) - weight_bytes(head, policy)
    weights = in_layers + 2 * head.params * policy.value_bytes(policy.weight_bits, VALUE_BYTES)
    # a sublayer's weights and the next one's
    layer = weight_bytes(attention, policy) + weight_bytes(feed_forward, policy)
    unpacks = policy.weight_bits < 16
    cache_values = batch * lengths.max_cached * kv_values(shape)  # of a batch, in a layer
    stored = batch * lengths.max_cached * kv_bytes(shape, policy)
    cache = layers * policy.num_gpu_batches * stored
    # decode attention copies keys and values in the order of its products; compressed ones are decompressed first
    attended = VALUE_BYTES * cache_values * (2 if policy.kv_bits < 16 else 1)
    host_attends = policy.cpu_attention and policy.kv_bits == 16
    loaded = 0.0 if host_attends else 2 * stored + attended
    inputs = VALUE_BYTES * batch * lengths.prompt * shape.hidden
    all_inputs = inputs * policy.num_gpu_batches
    # in prefill: input, its norm, queries, keys, values and one of them transposed; scores before and after the softmax
    scores = VALUE_BYTES * batch * shape.num_heads * lengths.prompt**2
    attending = 6 * inputs + 2 * scores + unpacks * VALUE_BYTES * attention.params
    feeding = 2 * inputs + inputs * shape.ffn / shape.hidden + unpacks * VALUE_BYTES * feed_forward.params
    logits = inputs + VALUE_BYTES * batch * lengths.prompt * shape.vocab
    moved: Fractions = (all_inputs, 2 * inputs, 2 * inputs)
    tokens: Fractions = (all_inputs / lengths.prompt, 2 * inputs / lengths.prompt, 2 * inputs / lengths.prompt)
    # float32 keys and values of a batch, to which the host attends
    workspace = 4.0 * cache_values if host_attends else 0.0

    def device(work: float, cache: Fractions, activations: Fractions) -> MemoryConstraint:
        rows = ((weights, layer, layer), cache, activations)
        of_weights, of_cache, of_activations = (
            (a / ALLOCATED_SHARE, b / ALLOCATED_SHARE, c / ALLOCATED_SHARE) for a, b, c in rows
        )
        constant = CONTEXT_BYTES + work / ALLOCATED_SHARE
        return MemoryConstraint("device", constant, of_weights, of_cache, of_activations)

    return [
        *(device(work, (cache, 0.0, 0.0), moved) for work in (attending, feeding, logits)),
        device(unpacks * VALUE_BYTES * attention.params, (cache + attended, loaded, loaded), tokens),
        MemoryConstraint("host", 0.0, (0.0, weights, 0.0), (0.0, cache + workspace, workspace),
                         (0.0, all_inputs, 0.0)),
        MemoryConstraint("disk", 0.0, (0.0, 0.0, weights), (0.0, 0.0, cache), (0.0, 0.0, all_inputs)),
    ]  # fmt: skip
