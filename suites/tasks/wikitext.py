"""WikiText-2 by tokens: perplexity over windows of 2,048 tokens, as papers on quantization give it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError
from harness.api.task import Answers, Circumstances, Judged, Questions, Report
from suites.tasks.data import Data, from_hub
from suites.tasks.measures import mean

FILE = "wikitext2_raw/wiki.test.raw"
WINDOW = 2048


@dataclass(frozen=True)
class WikiText:
    """Perplexity of a token of the test split, which is one text: windows do not overlap, what is left is left out.

    Source: GPTQ (Frantar et al. 2022), whose lines are joined by two more newlines. Each window's first token is only
    context. lm-eval's `wikitext` is by words of single pages: its figures are others.
    """

    name: str = "wikitext2_tokens"

    @property
    def protocol(self) -> str:
        """Which of WikiText's perplexities."""
        return f"WikiText-2 raw test, by tokens, windows of {WINDOW} tokens that do not overlap (GPTQ's)"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """The first `count` windows. Raises HarnessError where a model's context is shorter than a window."""
        if given.context < WINDOW:
            raise HarnessError(f"{self.name} is by windows of {WINDOW} tokens, the model's context is {given.context}")
        text, files = _text(given.folder)
        ids = given.tokens.encode(text)
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][: given.count]
        report(len(windows), len(windows))
        return Questions(pairs=tuple((w[:1], w[1:]) for w in windows), examples=len(windows), files=files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """The perplexity and its standard error by windows."""
        each = [score.logprob / (WINDOW - 1) for score in answers.scores]
        found = mean("nats", each)
        perplexity = math.exp(-found["nats"])
        figures = {"token_perplexity": perplexity, "token_perplexity_stderr": perplexity * found["nats_stderr"]}
        return Judged(figures, {"token_perplexity": tuple(each)})


def _text(folder: Path | None) -> tuple[str, Mapping[str, str]]:
    """All lines joined by two newlines, blank ones as nothing and others with the newline they end with: as `datasets`
    has them."""
    if folder is None:
        rows = from_hub("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
        return "\n\n".join(str(row["text"]) for row in rows), {}
    data = Data(folder)
    lines = data.text(FILE).removesuffix("\n").split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines), data.digests
