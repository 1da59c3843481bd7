"""Draws lengths of prompts and answers: from distributions, by the names of data sets, or from a trace's lines."""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.api import HarnessError, LengthSpec
from harness.common.words import nearest
from suites.trace_file import TraceLine

#: Draws a number of tokens, before it is rounded and capped.
Draw = Callable[[random.Random], float]

_CALL = re.compile(r"([a-z]+)\(\s*([0-9.]+)\s*(?:,\s*([0-9.]+)\s*)?\)")
#: Mean and standard deviation of prompts, and of answers: NanoFlow (Zhu et al. 2024), table 3.
DATA_SETS: Mapping[str, LengthSpec] = {
    "splitwise": LengthSpec("lognormal(1155, 1109)", "lognormal(211, 163)"),
    "lmsys": LengthSpec("lognormal(102, 169)", "lognormal(222, 210)"),
    "sharegpt": LengthSpec("lognormal(246, 547)", "lognormal(322, 244)"),
}
_KINDS = "constant(n), uniform(low, high), lognormal(mean, deviation)"


@dataclass(frozen=True)
class Lengths:
    """Draws (prompt, answer) tokens of request `index`, capped at `prompt_len` and `gen_len`, at least one of each.

    `lines`: those of a trace, in order and from the beginning again; else `prompt` and `output` are drawn from.
    """

    prompt_len: int
    gen_len: int
    prompt: Draw
    output: Draw
    lines: tuple[TraceLine, ...] = ()

    def of(self, index: int, seed: int) -> tuple[int, int]:
        """The lengths of a request: they depend on nothing else."""
        if self.lines:
            line = self.lines[index % len(self.lines)]
            drawn: tuple[float, float] = (line.prompt, line.generated)
        else:
            rng = random.Random(f"{seed}/lengths/{index}")
            drawn = (self.prompt(rng), self.output(rng))
        return _capped(drawn[0], self.prompt_len), _capped(drawn[1], self.gen_len)


def lengths_of(
    lengths: str | LengthSpec, prompt_len: int, gen_len: int, lines: tuple[TraceLine, ...] = ()
) -> Lengths:  # fmt: skip
    """What draws lengths: by the name of a data set, from distributions, or always the caps. Raises HarnessError."""
    if isinstance(lengths, str) and lengths:
        if lengths not in DATA_SETS:
            raise HarnessError(f"lengths {lengths!r:.60} is no data set; {nearest(lengths, DATA_SETS)}")
        lengths = DATA_SETS[lengths]
    if not isinstance(lengths, LengthSpec):
        lengths = LengthSpec(f"constant({prompt_len})", f"constant({gen_len})")
    return Lengths(prompt_len, gen_len, distribution(lengths.prompt), distribution(lengths.output), lines)


def distribution(text: str) -> Draw:
    """What draws from `constant(n)`, `uniform(low, high)` or `lognormal(mean, deviation)`: those of the lengths
    themselves, in tokens. Raises HarnessError for any other text."""
    match = _CALL.fullmatch(text.strip())
    try:
        name, values = (match[1], [float(v) for v in match.groups()[1:] if v]) if match else ("", [])
    except ValueError:
        name, values = "", []
    match name, values:
        case "constant", [value] if value >= 1:
            return lambda rng: value
        case "uniform", [low, high] if 1 <= low <= high:
            return lambda rng: rng.uniform(low, high)
        case "lognormal", [mean, deviation] if mean > 0:
            spread = math.log1p((deviation / mean) ** 2)
            return lambda rng: rng.lognormvariate(math.log(mean) - spread / 2, math.sqrt(spread))
    raise HarnessError(f"no distribution of lengths: {text!r:.60}; expected {_KINDS}, in tokens")


def _capped(drawn: float, most: int) -> int:
    return max(1, min(round(drawn), most))
