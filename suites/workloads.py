"""Workloads: where requests come from."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.api import GenerationRequest, HarnessError, SamplingParams

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


@dataclass(frozen=True)
class Traced:
    """Prompts of random token ids with the lengths of a trace's lines, in their order, decoded greedily.

    The trace is CSV with the columns ContextTokens and GeneratedTokens, as Azure's are (Patel et al. 2024). Where more
    requests are asked for than it has lines, it begins again; what is longer than the limits is cut to them.
    """

    trace: str
    prompt_len: int
    gen_len: int

    def lengths(self, count: int) -> list[tuple[int, int]]:
        """Prompt and generated tokens of each of `count` requests. Raises HarnessError for a file that is no trace."""
        try:
            with Path(self.trace).open(encoding="utf-8-sig", newline="") as file:
                lines = list(itertools.islice(self._lines(file), count))
        except csv.Error as exc:
            raise HarnessError(f"trace {self.trace} is no CSV: {exc}") from None
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
            raise HarnessError(f"trace {self.trace} cannot be read: {reason}; give a CSV file") from None
        if not lines:
            raise HarnessError(f"trace {self.trace} has no lines below its header")
        return list(itertools.islice(itertools.cycle(lines), count))

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]:
        """Request i depends on (seed, i, vocab) and its line only."""
        return [
            GenerationRequest(f"r{i:05d}", _random_ids(vocab, prompt, f"{seed}/{i}"),
                              SamplingParams(max_tokens=generated, ignore_eos=True))
            for i, (prompt, generated) in enumerate(self.lengths(count))
        ]  # fmt: skip

    def _lines(self, file: Iterator[str]) -> Iterator[tuple[int, int]]:
        for row in (reader := csv.DictReader(file)):
            try:
                prompt, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, ValueError, TypeError):
                where = f"{self.trace}:{reader.line_num}"
                raise HarnessError(f"{where}: expected whole numbers in ContextTokens and GeneratedTokens") from None
            if min(prompt, generated) < 0:
                raise HarnessError(f"{self.trace}:{reader.line_num}: a number of tokens is negative")
            # a line without any has none to time: one stands for it
            yield max(1, min(prompt, self.prompt_len)), max(1, min(generated, self.gen_len))


def _random_ids(vocab: int, length: int, key: str) -> tuple[int, ...]:
    first = min(FIRST_ORDINARY_ID, vocab - 1)
    rng = random.Random(key)
    return tuple(rng.randrange(first, vocab) for _ in range(length))
