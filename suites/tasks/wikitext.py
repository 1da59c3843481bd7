"""WikiText-2 perplexity by tokens over windows of 2,048 tokens, as papers on quantization report it."""

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
    """Token perplexity of the test split as a single text, in disjoint windows without the incomplete last one.

    Source: GPTQ (Frantar et al. 2022), which joins the lines with two further newlines. The first token of a window is
    only context. lm-eval's `wikitext` measures word perplexity page by page, so its figures differ.
    """

    name: str = "wikitext2_tokens"

    @property
    def protocol(self) -> str:
        """The definition of the perplexity."""
        return f"WikiText-2 raw test, by tokens, disjoint windows of {WINDOW} tokens (GPTQ)"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """The first `count` windows. Raises HarnessError where the model's context is shorter than a window."""
        if given.context < WINDOW:
            raise HarnessError(f"{self.name} needs windows of {WINDOW} tokens, the model's context is {given.context}")
        text, files = _text(given.folder)
        ids = given.tokens.encode(text)
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][: given.count]
        report(len(windows), len(windows))
        return Questions(pairs=tuple((w[:1], w[1:]) for w in windows), examples=len(windows), files=files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """The perplexity and its standard error over windows."""
        by_window = [score.logprob / (WINDOW - 1) for score in answers.scores]
        nats = mean("nats", by_window)
        perplexity = math.exp(-nats["nats"])
        figures = {"token_perplexity": perplexity, "token_perplexity_stderr": perplexity * nats["nats_stderr"]}
        return Judged(figures, {"token_perplexity": tuple(by_window)})


def _text(folder: Path | None) -> tuple[str, Mapping[str, str]]:
    """The test split joined by two newlines, and digests of its file. As in `datasets`, blank lines are empty and other
    lines keep their newline."""
    if folder is None:
        rows = from_hub("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
        return "\n\n".join(str(row["text"]) for row in rows), {}
    data = Data(folder)
    lines = data.text(FILE).removesuffix("\n").split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines), data.digests
