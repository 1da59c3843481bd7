"""A batch job from end to end: read the input, decide what can be run, load the engine once, generate, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

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
from harness.api.machine import mean_cached_tokens
from harness.batch.answer_file import AnswerFile
from harness.batch.format import answer, refusal
from harness.batch.input import Lines, Ready, Refused, Text, read
from harness.batch.job import BatchJob, Progress, job_cell
from harness.common.classify import classify

#: Refused lines that are reported one by one.
_REPORTED = 20


@dataclass(frozen=True)
class Tally:
    """What became of a job's lines, and tokens of the lines to run: `new_tokens` at most, `longest` prompt and new."""

    lines: int
    answered_before: int
    refused_before: int
    refused: int
    to_run: int
    prompt_tokens: int
    new_tokens: int
    longest: int


def run(job: BatchJob, progress: Progress) -> Tally:
    """Runs a job: every line of the input gets exactly one line of output, an answer or the reason for its refusal.

    Answers of an earlier run of the same job stay; lines that it refused are tried again. A dry run only decides.
    Raises HarnessError where nothing can be run or written, and InfeasibleError where the memory holds no line or the
    engine refuses to load.
    """
    if job.source.resolve() == job.output.resolve():
        raise HarnessError(f"{job.source} cannot be both --input and --output")
    cell = job_cell(job.model, job.engine, job.memory, job.overrides, progress.note)
    model = registry.prepare_model(cell.engine, cell.model, job.cache, _advance(progress, "preparing"))
    identity = registry.identity(cell.engine, model, job.cache, _advance(progress, "reading the model"))
    text: Text = registry.text(cell.engine, model)
    if problem := text.problem():
        progress.note(problem)
    with AnswerFile(job.output, identity, job.fresh, job.dry_run) as output:
        lines = read(job, model.shape, text, output.answered, progress)
        _refuse_too_long(lines, cell, model)
        _report(lines.refused, job.source, progress)
        if job.dry_run:
            return _tally(lines)
        output.remove(output.answered.keys() - lines.settled.keys())
        for item in lines.refused:
            output.write(refusal(item.number, item.id, item.reason), item.digest)
        if lines.ready:
            with _loaded(cell, model, lines, job.cache, progress) as engine:
                _generate(engine, lines, _public_name(cell.model.id), text, output, progress)
    return _tally(lines)


def _advance(progress: Progress, phase: str) -> Callable[[int, int], None]:
    return lambda done, total: progress.advance(phase, done, total)


# --------------------------------------------------------------------------- what can be run


def _refuse_too_long(lines: Lines, cell: RunSpec, model: LocalModel) -> None:
    """Refuses the lines that are longer than the engine's memory plan admits; planning loads nothing.

    An engine without a planner refuses in `load`, and so may one whose loader counts more memory than its plan does.
    Either ends the job with one line, because that error does not say which lines would fit. Raises InfeasibleError if
    no line fits.
    """
    if not lines.ready:
        return
    with _engine_errors(cell.engine):
        longest = registry.longest_sequence(_sized(cell, lines), model, min(item.tokens for item in lines.ready))
    if longest is None:
        return
    for item in lines.ready:
        if item.tokens > longest:
            reason = f"{item.tokens} tokens (prompt and new) are too long for the memory limit, which allows {longest}"
            lines.refused.append(item.refused(reason))
    lines.ready = [item for item in lines.ready if item.tokens <= longest]


def _sized(cell: RunSpec, lines: Lines) -> RunSpec:
    """The cell with a batch no larger than the job."""
    return replace(cell, policy=replace(cell.policy, gpu_batch_size=min(cell.policy.gpu_batch_size, lines.requests)))


def _report(refused: Sequence[Refused], source: Path, progress: Progress) -> None:
    for item in refused[:_REPORTED]:
        progress.note(f"{source}:{item.number}: {item.reason}")
    if len(refused) > _REPORTED:
        progress.note(f"... and {len(refused) - _REPORTED} more lines that cannot be run")


def _tally(lines: Lines) -> Tally:
    lengths = [(len(r.prompt), r.sampling.max_tokens) for item in lines.ready for r in item.requests]
    return Tally(
        lines=len(lines.ready) + len(lines.refused) + len(lines.settled),
        answered_before=sum(not a.refused for a in lines.settled.values()),
        refused_before=sum(a.refused for a in lines.settled.values()),
        refused=len(lines.refused),
        to_run=len(lines.ready),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        new_tokens=sum(new for _, new in lengths),
        longest=max((prompt + new for prompt, new in lengths), default=0),
    )


# --------------------------------------------------------------------------- from requests to answers


@contextmanager
def _loaded(cell: RunSpec, model: LocalModel, lines: Lines, cache: Path, progress: Progress) -> Iterator[Engine]:
    """The engine, loaded for the lines that are ready; closed at the end, when its scratch folder is removed too.

    Raises InfeasibleError where the engine refuses the limits; other exceptions of an engine become a HarnessError.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix="harness-generate-", dir=cache)
    except OSError as exc:
        raise HarnessError(f"cannot write {cache}: {exc.strerror or exc}; choose another --cache-dir") from exc
    tally, cell = _tally(lines), _sized(cell, lines)
    mean = max(1, int(mean_cached_tokens(tally.prompt_tokens, tally.new_tokens)) // lines.requests)
    work = Job(Path(scratch.name), cache, tally.longest, mean, _advance(progress, "loading"))
    progress.note(f"loading {cell.model.id} in {cell.engine}")
    with (
        scratch,
        _engine_errors(cell.engine),
        closing(registry.make_engine(cell.engine, dict(cell.options))) as engine,
    ):
        try:
            report = engine.load(model, cell.policy, cell.limits, work)
        except InfeasibleError as exc:
            what = f"cannot run {tally.to_run} lines of up to {tally.longest} tokens"
            raise InfeasibleError(f"{what}: {exc}", exc.lacking) from exc
        for note in report.notes:
            progress.note(note)
        yield engine


@contextmanager
def _engine_errors(engine: str) -> Iterator[None]:
    """Turns what an engine's libraries raise into a HarnessError of one line."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as exc:
        refusal = classify(exc)
        raise HarnessError(f"engine {engine} failed ({refusal.status}): {refusal.reason}") from exc


def _generate(engine: Engine, lines: Lines, model: str, text: Text, output: AnswerFile, progress: Progress) -> None:
    """Runs all requests; writes a line's answer when the last of its samples is finished."""
    requests = [request for item in lines.ready for request in item.requests]
    owner = {request.id: item for item in lines.ready for request in item.requests}
    unfinished: dict[int, dict[str, GenerationResult]] = {}
    written = tokens = 0
    for result in engine.generate(requests):
        item = owner[result.id]
        tokens += len(result.tokens)
        samples = unfinished.setdefault(item.line.number, {})
        samples[result.id] = result
        if len(samples) == len(item.requests):
            del unfinished[item.line.number]
            output.write(_answer(item, samples, model, text), item.digest)
            written += 1
        progress.advance("generating", written, len(lines.ready), tokens)
    if shared := engine.trace().metrics.get("shared_prompt_tokens"):
        total = sum(len(request.prompt) for request in requests)
        progress.note(f"{shared:.0f} of {total} prompt tokens were shared with an earlier request and computed once")


def _answer(item: Ready, samples: dict[str, GenerationResult], model: str, text: Text) -> dict[str, object]:
    results = [samples[request.id] for request in item.requests]
    texts = [_generated_text(text, result, item.line.sampling) for result in results]
    return answer(item.line, model, results, texts, text.token)


def _generated_text(text: Text, result: GenerationResult, sampling: SamplingParams) -> str:
    """The generated text, cut before the stop string that ended it."""
    whole = text.decode(result.tokens)
    if result.finish_reason != "stop":
        return whole
    too_early = len(text.decode(result.tokens[: max(0, sampling.min_tokens - 1)]))
    return whole[: sampling.stop_at(whole, too_early)]


def _public_name(model: str) -> str:
    """A hub id, or the last part of a path: answers are shared, folders of this machine are not."""
    return Path(model).resolve().name if Path(model).exists() else model
