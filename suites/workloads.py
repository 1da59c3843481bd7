"""Workloads: where requests come from."""

from __future__ import annotations

import random
from dataclasses import dataclass

from harness.api import GenerationRequest, SamplingParams

# The lowest ids of OPT and LLaMA vocabularies are special tokens (padding, begin, end, unknown).
FIRST_ORDINARY_ID = 5


@dataclass(frozen=True)
class Synthetic:
    """Prompts of uniformly random ordinary token ids, all of one length, decoded greedily to a fixed length."""

    prompt_len: int
    gen_len: int

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]:
        """Request i depends on (seed, i, vocab) only, so engines with other batch sizes share prompts."""
        sampling = SamplingParams(max_tokens=self.gen_len, ignore_eos=True)
        return [
            GenerationRequest(f"r{i:05d}", _random_ids(vocab, self.prompt_len, f"{seed}/{i}"), sampling)
            for i in range(count)
        ]


def _random_ids(vocab: int, length: int, key: str) -> tuple[int, ...]:
    first = min(FIRST_ORDINARY_ID, vocab - 1)
    rng = random.Random(key)
    return tuple(rng.randrange(first, vocab) for _ in range(length))
