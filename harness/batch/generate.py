"""A batch job: requests from a file through an engine into a file of answers, resumable at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from harness import registry
from harness.api import (
    Engine,
    GenerationResult,
    HarnessError,
    InfeasibleError,
    Job,
    LocalModel,
    RunSpec,
    SamplingParams,
)
from harness.batch.answer_file import Answered, AnswerFile, answered
from harness.batch.format import answer, refusal
from harness.batch.input import BatchJob, Progress, Ready, Refused, Text, read
from harness.common.classify import classify
from harness.common.host_memory import free_memory
from harness.suite.config import load_cell

#: Lines that are reported one by one.
_REPORTED = 20
#: What may be overridden, and of the free memory the part that the model's work gets by default.
_SETTABLE = ("model", "options", "policy", "limits")
_FREE_SHARE = 0.8


@dataclass(frozen=True)
class Tally:
    """What became of a job's lines, and the tokens of those to run: `new_tokens` at most, `longest` both together."""

    lines: int
    answered_before: int
    refused_before: int
    refused: int
    to_run: int
    prompt_tokens: int
    new_tokens: int
    longest: int


def cell(model: str, engine: str, memory: str | None, overrides: Sequence[str], progress: Progress) -> RunSpec:
    """What a job runs on: `memory` for the model's work or most of what is free, under `overrides` as of a suite.

    Raises HarnessError for what is unknown, malformed or of no effect here.
    """
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SETTABLE:
            raise HarnessError(f"--set {override}: a job has no {section!r}; it has {', '.join(_SETTABLE)}")
    capabilities = registry.make_engine(engine, {}).capabilities()
    policy = capabilities.batch_policy
    if memory is None:
        memory = f"{int(_FREE_SHARE * free_memory()) >> 20}MiB"
        progress.note(f"memory for the model's work: {memory} (--memory)")
    chosen = {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) != f.default}
    settings = {
        "engine": engine,
        "model": {"id": model},
        "policy": chosen,
        "limits": {"host_memory": memory},
        "workload": {"prompt_len": 1, "gen_len": 1},  # of its own a job has none
    }
    chosen_cell = load_cell(settings, overrides)
    if chosen_cell.tune != "none":
        raise HarnessError("policy: a job has no search for the largest batch; set policy.gpu_batch_size")
    if chosen_cell.limits.device_memory is not None and not capabilities.device:
        raise HarnessError(f"limits.device_memory: engine {engine} uses no device; limit host_memory")
    return chosen_cell


def summary(tally: Tally, dry: bool) -> str:
    """A job in one line."""
    parts = [f"{tally.lines} lines"]
    if before := tally.answered_before + tally.refused_before:
        parts.append(f"{before} from an earlier run, {tally.refused_before} of them refused")
    parts.append(
        f"{tally.to_run} {'to run' if dry else 'answered'} ({tally.prompt_tokens} prompt tokens and at most "
        f"{tally.new_tokens} new ones, {tally.longest} in the longest)"
    )
    parts.append(f"{tally.refused} refused")
    return "; ".join(parts)


def run(job: BatchJob, progress: Progress, dry: bool = False) -> Tally:
    """Runs a job, or with `dry` only says what it would be. Every line of the input gets exactly one of output.

    Lines answered by an earlier run of the same job are left as they are; those it refused are looked at again. A
    line that cannot be run is answered with the reason. Raises HarnessError where nothing can be run or written, and
    InfeasibleError where the memory holds none of the lines.
    """
    if job.source.resolve() == job.output.resolve():
        raise HarnessError(f"{job.source} cannot be both --input and --output")
    engine = job.cell.engine
    model = registry.prepare_model(engine, job.cell.model, job.cache, _advance(progress, "preparing"))
    identity = registry.identity(engine, model, job.cache, _advance(progress, "reading the model"))
    text: Text = registry.text(engine, model)
    if problem := text.problem():
        progress.note(problem)
    if dry:
        done = {} if job.fresh else answered(job.output, identity)
        ready, refused = read(job, model.shape, text, done, progress)
        _report(refused, job, progress)
        return _tally(ready, refused, _without(done, ready))
    with AnswerFile(job.output, identity, job.fresh) as output:
        ready, refused = read(job, model.shape, text, output.done, progress)
        output.forget({item.line.number for item in ready} & output.done.keys())
        done = output.done
        _refuse(refused, job, output, progress)
        if ready:
            with _loaded(job, model, ready, progress) as (loaded, longest):
                too_long = [
                    item.refused(f"{item.tokens} tokens are too long for the memory, which holds {longest} of a line")
                    for item in ready
                    if item.tokens > longest
                ]
                _refuse(too_long, job, output, progress)
                refused += too_long
                ready = [item for item in ready if item.tokens <= longest]
                _generate(loaded, ready, _name(job.cell.model.id), text, output, progress)
    return _tally(ready, refused, done)


def _advance(progress: Progress, phase: str) -> Callable[[int, int], None]:
    return lambda done, total: progress.advance(phase, done, total)


def _refuse(refused: Sequence[Refused], job: BatchJob, output: AnswerFile, progress: Progress) -> None:
    _report(refused, job, progress)
    for item in refused:
        output.write(refusal(item.number, item.id, item.reason), item.asked)


def _report(refused: Sequence[Refused], job: BatchJob, progress: Progress) -> None:
    for item in refused[:_REPORTED]:
        progress.note(f"{job.source}:{item.number}: {item.reason}")
    if len(refused) > _REPORTED:
        progress.note(f"... and {len(refused) - _REPORTED} more lines that cannot be run")


def _without(done: Mapping[int, Answered], ready: Sequence[Ready]) -> dict[int, Answered]:
    again = {item.line.number for item in ready}
    return {number: found for number, found in done.items() if number not in again}


def _name(model: str) -> str:
    """A hub id, or a folder's or file's own name: answers are for others to read too."""
    return Path(model).resolve().name if Path(model).exists() else model


def _tally(ready: Sequence[Ready], refused: Sequence[Refused], done: Mapping[int, Answered]) -> Tally:
    lengths = [(len(r.prompt), r.sampling.max_tokens) for item in ready for r in item.requests]
    return Tally(
        lines=len(ready) + len(refused) + len(done),
        answered_before=sum(not a.refused for a in done.values()),
        refused_before=sum(a.refused for a in done.values()),
        refused=len(refused),
        to_run=len(ready),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        new_tokens=sum(new for _, new in lengths),
        longest=max((prompt + new for prompt, new in lengths), default=0),
    )


# --------------------------------------------------------------------------- from requests to answers


@contextmanager
def _loaded(
    job: BatchJob, model: LocalModel, ready: Sequence[Ready], progress: Progress
) -> Iterator[tuple[Engine, int]]:
    """The engine, loaded, and the tokens of the longest lines it holds: all of them, or as many as fit the memory.

    Raises InfeasibleError where not even the shortest fits; what else an engine raises becomes a HarnessError.
    """
    try:
        job.cache.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix="harness-generate-", dir=job.cache)
    except OSError as exc:
        raise HarnessError(f"cannot write {job.cache}: {exc.strerror or exc}; choose another --cache-dir") from exc
    progress.note(f"loading {job.cell.model.id} in {job.cell.engine}")

    def load(longest: int) -> Engine:
        return _load(job, model, [item for item in ready if item.tokens <= longest], Path(scratch.name), progress)

    with scratch, _engine_errors(job.cell.engine):
        engine, longest = _longest_that_fits(load, sorted({item.tokens for item in ready}))
        try:
            yield engine, longest
        finally:
            engine.close()


def _load(job: BatchJob, model: LocalModel, lines: Sequence[Ready], scratch: Path, progress: Progress) -> Engine:
    tally, requests = _tally(lines, (), {}), sum(len(item.requests) for item in lines)
    policy = replace(job.cell.policy, gpu_batch_size=min(job.cell.policy.gpu_batch_size, requests))
    mean = (tally.prompt_tokens + tally.new_tokens // 2) // requests
    work = Job(Path(mkdtemp(dir=scratch)), job.cache, tally.longest, max(1, mean), _advance(progress, "loading"))
    engine = registry.make_engine(job.cell.engine, dict(job.cell.options))
    try:
        for note in engine.load(model, policy, job.cell.limits, work).notes:
            progress.note(note)
    except BaseException:
        engine.close()
        raise
    return engine


def _longest_that_fits(load: Callable[[int], Engine], lengths: Sequence[int]) -> tuple[Engine, int]:
    """The engine loaded for the most tokens of the rising `lengths` that it does not refuse, and how many those are."""
    try:
        return load(lengths[-1]), lengths[-1]
    except InfeasibleError:
        if len(lengths) == 1:
            raise
    load(lengths[0]).close()
    fits, fails = 0, len(lengths) - 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            load(lengths[middle]).close()
            fits = middle
        except InfeasibleError:
            fails = middle
    return load(lengths[fits]), lengths[fits]


@contextmanager
def _engine_errors(engine: str) -> Iterator[None]:
    """What other libraries raise, as one line."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as exc:
        refusal = classify(exc)
        raise HarnessError(f"engine {engine} failed ({refusal.status}): {refusal.reason}") from exc


def _generate(
    engine: Engine, ready: Sequence[Ready], name: str, text: Text, output: AnswerFile, progress: Progress
) -> None:
    """Writes each line's answer when the last of its samples is there."""
    owners = {request.id: item for item in ready for request in item.requests}
    parts: dict[int, dict[str, GenerationResult]] = {}
    finished = tokens = 0
    for result in engine.generate([request for item in ready for request in item.requests]):
        item = owners[result.id]
        tokens += len(result.tokens)
        have = parts.setdefault(item.line.number, {})
        have[result.id] = result
        if len(have) == len(item.requests):
            results = [have[request.id] for request in item.requests]
            texts = [_generated_text(text, r, item.line.sampling) for r in results]
            output.write(answer(item.line, name, results, texts, text.token), item.asked)
            del parts[item.line.number]
            finished += 1
        progress.advance("generating", finished, len(ready), tokens)
    if shared := engine.trace().metrics.get("shared_prompt_tokens"):
        total = sum(len(request.prompt) for item in ready for request in item.requests)
        progress.note(f"{shared:.0f} of {total} prompt tokens were those of an earlier request, and not computed again")


def _generated_text(text: Text, result: GenerationResult, sampling: SamplingParams) -> str:
    """Up to the stop string that ended it, which is not part of it."""
    whole = text.decode(result.tokens)
    if result.finish_reason != "stop":
        return whole
    too_early = len(text.decode(result.tokens[: max(0, sampling.min_tokens - 1)]))
    return whole[: sampling.stop_at(whole, too_early)]
