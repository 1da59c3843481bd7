"""Workloads that generate requests: synthetic prompts, and the lengths of a trace."""

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.api import GenerationRequest, HarnessError, SamplingParams

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
        try:
            with Path(self.trace).open(encoding="utf-8-sig", newline="") as file:
                lines = list(itertools.islice(self._lines(file), count))
        except csv.Error as exc:
            raise HarnessError(f"trace {self.trace} is not CSV: {exc}") from None
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
            raise HarnessError(f"trace {self.trace} cannot be read: {reason}; give a CSV file") from None
        if not lines:
            raise HarnessError(f"trace {self.trace} has no lines below its header")
        return list(itertools.islice(itertools.cycle(lines), count))

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]:
        """Request i depends only on (seed, i, vocab) and its line."""
        return _requests(self.lengths(count), vocab, seed)

    def _lines(self, file: Iterator[str]) -> Iterator[tuple[int, int]]:
        for row in (reader := csv.DictReader(file)):
            try:
                prompt, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, ValueError, TypeError):
                line = f"{self.trace}:{reader.line_num}"
                raise HarnessError(f"{line}: expected integers in ContextTokens and GeneratedTokens") from None
            if min(prompt, generated) < 0:
                raise HarnessError(f"{self.trace}:{reader.line_num}: a number of tokens is negative")
            # a request needs at least one token of each
            yield max(1, min(prompt, self.prompt_len)), max(1, min(generated, self.gen_len))


def _requests(lengths: Sequence[tuple[int, int]], vocab: int, seed: int) -> list[GenerationRequest]:
    first = min(FIRST_ORDINARY_ID, vocab - 1)
    requests = []
    for i, (prompt_len, gen_len) in enumerate(lengths):
        rng = random.Random(f"{seed}/{i}")
        ids = tuple(rng.randrange(first, vocab) for _ in range(prompt_len))
        requests.append(GenerationRequest(f"r{i:05d}", ids, SamplingParams(max_tokens=gen_len, ignore_eos=True)))
    return requests
