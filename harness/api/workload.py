"""What to ask: the workload of a cell, its lengths, and the objectives that an online one is held to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.api.common import FORBID

#: How requests arrive: independently, in bursts, evenly, or at the times of a trace.
Process = Literal["poisson", "gamma", "constant", "trace"]


@dataclass(frozen=True)
class LengthSpec:
    """Distributions of tokens, as text such as `lognormal(102, 169)`: of each prompt and of each answer."""

    __pydantic_config__ = FORBID

    prompt: str
    output: str


@dataclass(frozen=True)
class Slo:
    """Objectives in seconds; None is no limit. `ttft_s`: from when a request was due to its first token. `tpot_s`: time
    per output token after the first. `normalized_s`: end-to-end latency over output tokens.

    A rate is within them if the share `attainment` of its requests is within all of them, or with `mean` if the mean
    of each figure is. Sources: DistServe (Zhong et al. 2024) for the share, NanoFlow (Zhu et al. 2024) for the mean.
    """

    __pydantic_config__ = FORBID

    ttft_s: float | None = None
    tpot_s: float | None = None
    normalized_s: float | None = None
    attainment: float | Literal["mean"] = 0.9

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by their names."""
        named = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "normalized_s": self.normalized_s}
        return {name: limit for name, limit in named.items() if limit is not None}

    @property
    def words(self) -> str:
        """The objectives in words, for messages."""
        by = self.attainment if self.attainment == "mean" else f"{100 * float(self.attainment):g} %"
        return f"{' and '.join(f'{name} {limit:g}' for name, limit in self.limits.items())} ({by})"


@dataclass(frozen=True)
class StopWhen:
    """When a rate's arrivals end before their time: once the 95 % interval of the mean of each latency that has an
    objective (without objectives: of the normalized one) is at most the share `ci_width` of that mean. The intervals of
    all looks hold together."""

    __pydantic_config__ = FORBID

    ci_width: float


@dataclass(frozen=True)
class WorkloadSpec:
    """Synthetic requests: `num_requests` prompts of `prompt_len` random tokens, `gen_len` new tokens each.

    `num_requests: auto` runs whole blocks of the engine's batch, as many as a steady state takes. Kind `trace` reads
    the lengths from a CSV file, capped at `prompt_len` and `gen_len`; a trace is identified by its path, so changed
    content needs a new path. Kind `task` runs an accuracy task's examples, all or the first `num_requests`; the
    examples set the lengths.

    Kinds `arrivals` and `conversation` are online: requests come while the engine runs, at `rate` a second by
    `process`, or in a closed loop of `concurrency` users, until `num_requests` (conversations) or for `duration_s`.
    Lengths are drawn from `lengths`, a name or distributions, or read from `trace`, and capped at `prompt_len` and
    `gen_len`. `cv`: coefficient of variation of a gamma process's intervals. A conversation has `rounds`, with
    exponential pauses of mean `think_s` between an answer and the next turn. `stop_when` ends a rate before its time.
    """

    __pydantic_config__ = FORBID

    kind: Literal["synthetic", "trace", "task", "arrivals", "conversation"] = "synthetic"
    prompt_len: int = 128
    gen_len: int = 16
    num_requests: int | Literal["auto"] = "auto"
    trace: str = ""
    task: str = ""
    process: Process = "poisson"
    rate: float | Literal["sweep"] | None = None
    cv: float = 1.0
    concurrency: int | None = None
    duration_s: float | None = None
    lengths: str | LengthSpec = ""
    rounds: int = 1
    think_s: float = 0.0
    slo: Slo | None = None
    stop_when: StopWhen | None = None

    @property
    def online(self) -> bool:
        """Whether requests come while the engine runs."""
        return self.kind in ("arrivals", "conversation")

    @property
    def words(self) -> str:
        """The workload in words, for messages."""
        if self.kind == "task":
            return f"task {self.task}"
        lengths = f"prompt {self.prompt_len}, generate {self.gen_len}"
        if self.online:
            objectives = "" if self.slo is None else f", within {self.slo.words}"
            return f"{self._arrivals}, {self._drawn}{lengths}{objectives}"
        return lengths if self.kind == "synthetic" else f"lengths of {Path(self.trace).name} up to {lengths}"

    @property
    def label(self) -> str:
        """The workload in short, for names of cells."""
        if self.kind == "task":
            return self.task
        lengths = f"p{self.prompt_len}g{self.gen_len}"
        if self.online:
            pace = f"x{self.concurrency}" if self.concurrency else self.process
            rate = self.rate if self.rate in (None, "sweep") else f"{self.rate:g}"
            drawn = Path(self.trace).stem or (self.lengths if isinstance(self.lengths, str) else "drawn")
            rounds = f"r{self.rounds}" if self.kind == "conversation" else None
            return "-".join(str(part) for part in (pace, rate, drawn, rounds, lengths) if part)
        return lengths if self.kind == "synthetic" else f"{Path(self.trace).stem}-{lengths}"

    @property
    def _arrivals(self) -> str:
        """Who sends when, in words."""
        what = f"conversations of {self.rounds} rounds" if self.kind == "conversation" else "requests"
        if self.concurrency:
            return f"{what} of {self.concurrency} users in a closed loop"
        process = f"gamma (cv {self.cv:g})" if self.process == "gamma" else self.process
        if self.rate == "sweep":
            pace = "at rates up to saturation"
        else:
            pace = "at the trace's times" if self.rate is None else f"at {self.rate:g}/s"
        return f"{what}, {process}, {pace}"

    @property
    def _drawn(self) -> str:
        """Where lengths come from, in words."""
        if self.trace:
            return f"lengths of {Path(self.trace).name} up to "
        if isinstance(self.lengths, LengthSpec):
            return f"lengths {self.lengths.prompt} and {self.lengths.output} up to "
        return f"lengths of {self.lengths} up to " if self.lengths else ""
