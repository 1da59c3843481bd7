"""Plans for engines that run transformers' `generate` over weights that are fetched: Accelerate and ZeRO-Inference.

Their policy is a batch. One tier holds all weights, the device all of the KV cache, which grows by concatenation.
"""

from collections.abc import Sequence
from dataclasses import replace

from engines.common.work_memory import CONTEXT_BYTES
from engines.planning.memory import ALLOCATED_SHARE, TIERS, MemoryConstraint
from engines.planning.simulated_planner import SimulatedPlanner
from engines.planning.workload import VALUE_BYTES, Fractions, kv_bytes, model_weight_bytes, sublayers, weight_bytes
from harness.api import OffloadPolicy

#: Doubled, as nearly all that papers report for these engines.
_BATCH_SIZES = tuple(2**i for i in range(13))
_ON_DEVICE: Fractions = (1.0, 0.0, 0.0)
#: Bytes of a value while the softmax of a prompt's scores runs: in 16 bits, and in float32 before and after.
_SCORE_BYTES = 2.0 + 4.0 + 4.0


class GeneratePlanner(SimulatedPlanner):
    """Plans with the placements that the engine has: weights go to the first of its tiers that holds them."""

    batch_sizes = _BATCH_SIZES

    def with_fractions(self, policy: OffloadPolicy) -> OffloadPolicy:
        """The policy with weights on the first tier with room for one sequence, as they are placed before a batch is
        known; on the last tier if none has.
        """
        placed = [self._placed(policy, tier) for tier in self.engine.weight_tiers]
        single = (p for p in placed if not self.missing(self.estimate(replace(p, gpu_batch_size=1))))
        return next(single, placed[-1])

    def runnable(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """As with_fractions; None if the batch does not fit."""
        placed = self.with_fractions(policy)
        return None if self.missing(self.estimate(placed)) else placed

    def _placed(self, policy: OffloadPolicy, tier: str) -> OffloadPolicy:
        device, host, disk = (float(tier == name) for name in TIERS)
        return replace(
            policy,
            weights=policy.weights or (device, host, disk),
            cache=policy.cache or _ON_DEVICE,
            activations=policy.activations or _ON_DEVICE,
        )

    def _constraints(self, policy: OffloadPolicy) -> Sequence[MemoryConstraint]:
        """Prefill holds the scores of a layer's attention and logits of all positions. Decode holds the cache of the
        last step beside that of this step, which `torch.cat` makes from it layer by layer.
        """
        shape, lengths, batch = self.shape, self.lengths, policy.gpu_batch_size
        weights = model_weight_bytes(shape, policy)
        parts = sublayers(shape)
        layer = sum(weight_bytes(part, policy) for part in parts if not part.is_head)
        head = sum(weight_bytes(part, policy) for part in parts if part.is_head)
        # a hook frees a layer before it fetches the head; ZeRO keeps the head, which is the embedding, and reads ahead
        in_flight = 2 * layer + head if self.engine.overlap == "layer" else max(layer, head)
        token_cache = batch * kv_bytes(shape, policy) * shape.num_layers
        prompt, cache = lengths.prompt, lengths.max_cached * token_cache
        inputs = VALUE_BYTES * batch * shape.hidden * prompt
        scores = _SCORE_BYTES * batch * shape.num_heads * prompt**2
        logits = VALUE_BYTES * batch * prompt * shape.vocab
        none: Fractions = (0.0, 0.0, 0.0)

        def device(work: float, held_cache: float) -> MemoryConstraint:
            held = [size / ALLOCATED_SHARE for size in (work, weights, in_flight, held_cache)]
            return MemoryConstraint(
                "device", CONTEXT_BYTES + held[0], (held[1], held[2], held[2]), (held[3], 0.0, 0.0), none
            )

        return [
            device(scores + 4 * inputs, prompt * token_cache),
            device(logits, prompt * token_cache),
            device(0.0, 2 * cache),
            MemoryConstraint("host", 0.0, (0.0, weights, in_flight), (0.0, cache, 0.0), (0.0, inputs, 0.0)),
            MemoryConstraint("disk", 0.0, (0.0, 0.0, weights), (0.0, 0.0, cache), (0.0, 0.0, inputs)),
        ]  # fmt: skip
