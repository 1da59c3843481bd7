"""`harness tune`: measures a layer, searches a pipeline of nano-batches, and keeps it where passes become faster."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from harness import registry
from harness.api import (
    Engine,
    GenerationRequest,
    HarnessError,
    LayerTimes,
    LocalModel,
    NanoPipeline,
    RunSpec,
    SamplingParams,
)
from harness.api.machine import mean_cached_length
from harness.batch.job import Lengths, Progress, engine_errors, job_cell, loaded_engine
from harness.common.files import os_errors
from harness.common.kept_nano_batches import KeptNanoBatches
from harness.common.scratch import remove_abandoned
from harness.common.units import rounded


@dataclass(frozen=True)
class TuneJob:
    """The options of `harness tune`: `requests` prompts of `prompt_len` tokens run at once, `gen_len` new ones each;
    with and without nano-batches in turn, `turns` times. The rest as BatchJob has it."""

    model: str
    memory: str | None
    overrides: tuple[str, ...]
    prompt_len: int
    gen_len: int
    requests: int
    turns: int
    cache: Path


@dataclass(frozen=True)
class Tuned:
    """What was found: a layer's times, the pipeline, token/s of each turn by the policy's `nano_batches`, which of
    these was kept, why."""

    times: LayerTimes
    pipeline: NanoPipeline
    rates: Mapping[int | str, Sequence[float]]
    kept: int | str
    why: str


def tune(job: TuneJob, progress: Progress) -> Tuned:
    """Measures, searches, tries and keeps.

    Raises HarnessError for a model that cannot be run, a policy that has no nano-batches and a cache that cannot be
    written, InfeasibleError where the memory is too small.
    """
    cell = job_cell(
        job.model, "offload", job.memory, job.overrides, progress.note,
        {"policy": {"schedule": "sweep", "gpu_batch_size": job.requests}},
    )  # fmt: skip
    _require_tunable(cell)
    probe = registry.layer_probe()
    remove_abandoned(job.cache)
    model = registry.prepare_model("offload", cell.model, job.cache, partial(progress.advance, "preparing"))
    if job.prompt_len + job.gen_len > (context := model.shape.max_context):
        raise HarnessError(f"--prompt-len {job.prompt_len} and --gen-len {job.gen_len}: the model's context has "
                           f"{context} tokens")  # fmt: skip
    trial = _Trial(job, cell, model, progress)
    with engine_errors("offload"):
        first, read_s = trial.run(1, 0)
        rates: dict[int | str, list[float]] = {1: [first]}
        times = probe.layer_times(
            job.cache, model, cell.policy, job.requests, mean_cached_length(trial.lengths), read_s,
            lambda what: progress.note(f"measuring {what}"),
        )  # fmt: skip
        search = registry.nano_search()
        pipeline = search.search_measured(model.shape, times)
        if (order := search.order_of(pipeline, times)) is not None:
            found = str(order)
            rates[found] = [trial.run(found, 0)[0]]
            for turn in range(1, job.turns):
                for tried in (1, found) if turn % 2 else (found, 1):
                    rates[tried].append(trial.run(tried, turn)[0])
    kept, why = choose(rates)
    with os_errors(f"cannot write {job.cache}", "choose another --cache-dir"):
        KeptNanoBatches(job.cache).keep(model.shape, cell.policy, kept)
    return Tuned(times, pipeline, rates, kept, why)


def choose(rates: Mapping[int | str, Sequence[float]]) -> tuple[int | str, str]:
    """The nano-batches to keep by token/s of each turn, without any as 1; and why. None unless the slowest turn with
    them is faster than the fastest without."""
    others = [tried for tried in rates if tried != 1]
    if not others:
        return 1, "the search finds no nano-batches that would shorten a pass"
    [found] = others
    gain = median(rates[found]) / median(rates[1]) - 1
    if min(rates[found]) > max(rates[1]):
        return found, f"every turn with nano-batches was faster than all without, {gain:+.1%} by their medians"
    return 1, f"nano-batches are not clearly faster ({gain:+.1%} by the medians of turns that overlap)"


def _require_tunable(cell: RunSpec) -> None:
    """Raises HarnessError for a cell that has no nano-batches to be tuned."""
    if cell.limits.gpu:
        raise HarnessError("limits.device_memory: harness tune measures hosts; beside a device set policy.nano_batches")
    if cell.policy.schedule != "sweep":
        raise HarnessError(f"policy.schedule is {cell.policy.schedule}: nano-batches are parts of a sweep's batch; "
                           "leave it out")  # fmt: skip
    if cell.policy.nano_batches != 1 or not cell.policy.nano_overlap:
        raise HarnessError("policy.nano_batches and nano_overlap: harness tune finds them; leave them out")
    if cell.policy.ranks != 1:
        name = "pipeline" if cell.policy.pipeline != 1 else "tensor"
        raise HarnessError(f"policy.{name}: harness tune measures one process; leave it out")


class _Trial:
    """A job that is run by engines that differ in their nano-batches only."""

    def __init__(self, job: TuneJob, cell: RunSpec, model: LocalModel, progress: Progress) -> None:
        self._job, self._cell, self._model, self._progress = job, cell, model, progress
        self._first = True
        self.lengths = [(job.prompt_len, job.gen_len)] * job.requests

    def run(self, nano_batches: int | str, turn: int) -> tuple[float, float]:
        """Loads the model and runs the job: generated token/s, and seconds in which a pass reads a layer's weights."""
        cell = replace(self._cell, policy=replace(self._cell.policy, nano_batches=nano_batches))
        shown = partial(self._progress.advance, "loading")
        lengths = Lengths.of(self.lengths)
        with loaded_engine(cell, self._model, self._job.cache, lengths, self._note, shown) as engine:
            self._generate(engine, -1 - turn, new=2)  # a library prepares for each number of rows
            began = time.perf_counter()
            self._generate(engine, turn, self._job.gen_len)
            seconds = time.perf_counter() - began
            metrics = engine.trace().metrics
        rate = self._job.requests * self._job.gen_len / seconds
        self._first = False
        what = "no nano-batches" if nano_batches == 1 else "nano-batches"
        self._progress.note(f"turn {turn + 1}, {what}: {rounded(rate)} token/s")
        return rate, metrics["task_load_weights_s"] / metrics["passes"] / self._model.shape.num_layers

    def _generate(self, engine: Engine, seed: int, new: int) -> None:
        draw = random.Random(seed)
        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        prompts = [
            tuple(draw.randrange(self._model.shape.vocab) for _ in range(self._job.prompt_len))
            for _ in range(self._job.requests)
        ]
        for _ in engine.generate([GenerationRequest(f"r{i}", p, sampling) for i, p in enumerate(prompts)]):
            pass

    def _note(self, text: str) -> None:
        """What the first load says; the others say the same."""
        if self._first and text:
            self._progress.note(text)
