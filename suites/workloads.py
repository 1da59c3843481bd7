"""Workloads that generate requests: synthetic prompts, and the lengths of a trace."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.api import GenerationRequest, SamplingParams
from suites.trace_file import read_trace

# The lowest ids of OPT and LLaMA vocabularies are special tokens (padding, begin, end, unknown).
FIRST_ORDINARY_ID = 5


@dataclass(frozen=True)
class Synthetic:
    """Prompts of equal length with uniformly random ordinary token ids, decoded greedily to a fixed length."""

    prompt_len: int
    gen_len: int

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]:
        """Request i depends only on (seed, i, vocab), so engines with different batch sizes share prompts."""
        return _requests([(self.prompt_len, self.gen_len)] * count, vocab, seed)


@dataclass(frozen=True)
class Traced:
    """Prompts of random token ids with the lengths of a trace's lines, in order, decoded greedily.

    The trace is CSV with the columns ContextTokens and GeneratedTokens, as Azure's traces (Patel et al. 2024). The
    workload repeats the lines for more requests than lines, and caps lengths at `prompt_len` and `gen_len`.
    """

    trace: str
    prompt_len: int
    gen_len: int

    def lengths(self, count: int) -> list[tuple[int, int]]:
        """(Prompt tokens, generated tokens) of each of `count` requests. Raises HarnessError for an invalid trace."""
        lines = read_trace(self.trace, count)
        # a request needs at least one token of each
        capped = [
            (max(1, min(line.prompt, self.prompt_len)), max(1, min(line.generated, self.gen_len))) for line in lines
        ]
        return list(itertools.islice(itertools.cycle(capped), count))

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]:
        """Request i depends only on (seed, i, vocab) and its line."""
        return _requests(self.lengths(count), vocab, seed)


def random_tokens(count: int, vocab: int, seed: int | str, index: int) -> tuple[int, ...]:
    """Ordinary token ids, uniformly random: prompt `index` of a seed."""
    first = min(FIRST_ORDINARY_ID, vocab - 1)
    rng = random.Random(f"{seed}/{index}")
    return tuple(rng.randrange(first, vocab) for _ in range(count))


def _requests(lengths: Sequence[tuple[int, int]], vocab: int, seed: int) -> list[GenerationRequest]:
    requests = []
    for i, (prompt_len, gen_len) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=gen_len, ignore_eos=True)
        requests.append(GenerationRequest(f"r{i:05d}", random_tokens(prompt_len, vocab, seed, i), sampling))
    return requests
