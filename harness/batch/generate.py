"""A batch job from end to end: read the input, decide what can be run, load the engine, generate, write."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import (
    GenerationResult,
    HarnessError,
    InfeasibleError,
    LocalModel,
    RefusedEvent,
    RunSpec,
    without_logins,
)
from harness.api.task import Text
from harness.batch.answer_file import AnswerFile, AnswerStream
from harness.batch.format import answer, refusal
from harness.batch.input import Lines, Ready, Refused, read
from harness.batch.job import (
    STDIO,
    Answerer,
    BatchJob,
    Lengths,
    Loader,
    Progress,
    answered_by,
    engine_errors,
    job_cell,
    loaded_engine,
)
from harness.batch.texts import echo_of, generated_text
from harness.common.scratch import remove_abandoned

#: Refused lines that are reported one by one.
_REPORTED = 20


def run(
    job: BatchJob, progress: Progress, show: Callable[[Mapping[str, Any]], None], load: Loader = loaded_engine
) -> Lines:
    """Runs a job: every line of the input gets exactly one line of output, an answer or the reason for its refusal.
    `show` takes the lines of an output to stdout; `load` gives what answers: an engine here, or others elsewhere.

    Answers of an earlier run of the same job stay; lines that it refused are tried again. A dry run decides what
    can be decided without loading, and stops. Of the lines returned, those that are `ready` were answered, or would be.

    Raises HarnessError where nothing can be run or written, and InfeasibleError where the memory holds no line.
    """
    if job.source != STDIO and job.source.resolve() == job.output.resolve():
        raise HarnessError(f"{job.source} cannot be both --input and --output")
    cell = job_cell(job.model, job.engine, job.memory, job.overrides, progress.note)
    model = registry.prepare_model(cell.engine, cell.model, job.cache, partial(progress.advance, "preparing"))
    identity = registry.identity(cell.engine, model, job.cache, partial(progress.advance, "reading the model"))
    text = registry.text(cell.engine, model)
    if problem := text.problem():
        progress.note(problem)
    with closing(_output(job, answered_by(cell, identity), show)) as output:
        with closing(text):  # the process that renders chats: the engine needs its memory
            lines = read(job, model.shape, text, output.answered, progress)
        with engine_errors(cell.engine):
            _refuse_too_long(lines, cell, model)
        _report(lines.refused, job, progress)
        if job.dry_run:
            return lines
        remove_abandoned(job.cache)  # also where there is nothing left to load an engine for
        output.remove(output.answered.keys() - lines.settled.keys())
        write_refused(lines.refused, output)
        if lines.ready:
            planned = len(lines.refused)
            with engine_errors(cell.engine), ExitStack() as opened:
                engine = _load(opened, load, cell, model, lines, job.cache, progress)
                _report(lines.refused[planned:], job, progress)
                write_refused(lines.refused[planned:], output)
                results = engine.generate(lines.requests)
                told = len(lines.refused)
                write_answers(results, lines, public_name(cell.model.id), text, output, progress)
                _report(lines.refused[told:], job, progress)
                if shared := engine.trace().metrics.get("shared_prompt_tokens"):
                    of_all = f"{shared:.0f} of {lines.prompt_tokens} prompt tokens"
                    progress.note(f"{of_all} were shared with an earlier request and computed once")
    return lines


def _output(job: BatchJob, model: str, show: Callable[[Mapping[str, Any]], None]) -> AnswerFile | AnswerStream:
    if job.output == STDIO:
        return AnswerStream(model, show)
    return AnswerFile(job.output, model, job.fresh, job.dry_run)


def write_refused(refused: Sequence[Refused], output: AnswerFile | AnswerStream) -> None:
    """Writes why these lines cannot be run."""
    for item in refused:
        output.write(refusal(item.number, item.id, item.reason), item.digest)


def _refuse_too_long(lines: Lines, cell: RunSpec, model: LocalModel) -> None:
    """Refuses the lines that are longer than the engine's memory plan admits, if it has one; planning loads nothing.

    Raises InfeasibleError if no line fits.
    """
    if not lines.ready:
        return
    longest = registry.longest_sequence(_sized(cell, lines), model, min(item.tokens for item in lines.ready))
    if longest is not None:
        lines.refuse_longer(longest, f", which allows {longest}")


def _load(
    opened: ExitStack, loading: Loader, cell: RunSpec, model: LocalModel, lines: Lines, cache: Path, progress: Progress
) -> Answerer:  # fmt: skip
    """The engine, loaded for the lines that are ready; lines that it has no memory for become refused.

    Whether a sequence is too long, an engine without a memory planner tells only in `load`, and so may one whose loader
    counts more memory than its plan. After each refusal twice as many of the longest lengths are left out; once a load
    succeeds, bisection finds the longest length that fits. Raises InfeasibleError if none does.
    """

    def load(longest: int) -> Answerer:
        opened.close()  # two engines at once would need memory for both
        fitting = Lines([item for item in lines.ready if item.tokens <= longest])
        progress.note(f"loading {cell.model.id} in {cell.engine} for sequences of up to {longest} tokens")
        lengths = Lengths.of([(len(r.prompt), r.sampling.max_tokens) for r in fitting.requests])
        shown = partial(progress.advance, "loading")
        return opened.enter_context(loading(_sized(cell, fitting), model, cache, lengths, progress.note, shown))

    lengths = sorted({item.tokens for item in lines.ready})
    fits, refused = -1, len(lengths)  # the index of the longest length that fits, and of the shortest that does not
    reasons: list[InfeasibleError] = []
    engine: Answerer | None = None
    while refused - fits > 1:
        index = (fits + refused) // 2 if fits >= 0 else max(0, refused - max(1, len(lengths) - refused))
        try:
            engine, fits = load(lengths[index]), index
        except InfeasibleError as exc:
            engine, refused = None, index
            reasons.append(exc.with_traceback(None))  # its frames would keep the engine in memory
    if fits < 0:
        what = f"cannot run {len(lines.ready)} lines of up to {lengths[-1]} tokens"
        raise InfeasibleError(f"{what}: {reasons[0]}", reasons[0].lacking) from reasons[0]
    if reasons:
        lines.refuse_longer(lengths[fits], f": {reasons[-1]}")
    return engine or load(lengths[fits])


def _sized(cell: RunSpec, lines: Lines) -> RunSpec:
    """The cell with a batch no larger than the job."""
    policy = replace(cell.policy, gpu_batch_size=min(cell.policy.gpu_batch_size, len(lines.requests)))
    return replace(cell, policy=policy)


def _report(refused: Sequence[Refused], job: BatchJob, progress: Progress) -> None:
    for item in refused[:_REPORTED]:
        progress.note(f"{job.source_name}:{item.number}: {item.reason}")
    if len(refused) > _REPORTED:
        progress.note(f"... and {len(refused) - _REPORTED} more lines that cannot be run")


def write_answers(
    results: Iterable[GenerationResult | RefusedEvent], lines: Lines, model: str, text: Text,
    output: AnswerFile | AnswerStream, progress: Progress,
) -> None:  # fmt: skip
    """Writes a line's answer when the last of its samples is among `results`, or that the engine refuses it: such a
    line is among the refused ones in the end."""
    owner = {request.id: item for item in lines.ready for request in item.requests}
    unfinished: dict[int, dict[str, GenerationResult]] = {}
    refused: dict[int, str] = {}
    written = tokens = 0
    progress.advance("generating", written, len(lines.ready))  # the rate counts from here
    for result in results:
        item = owner[result.id]
        number = item.line.number
        if number in refused:
            continue
        samples = unfinished.setdefault(number, {})
        if isinstance(result, RefusedEvent):
            refused[number] = result.reason
            write_refused([Refused(number, item.digest, item.line.id, result.reason)], output)
        else:
            samples[result.id] = result
            tokens += len(result.tokens)
            if len(samples) < len(item.requests):
                progress.advance("generating", written, len(lines.ready), tokens)
                continue
            output.write(_answer(item, samples, model, text), item.digest)
        del unfinished[number]
        written += 1
        progress.advance("generating", written, len(lines.ready), tokens)
    lines.refuse(lambda item: refused.get(item.line.number, ""))


def _answer(item: Ready, samples: dict[str, GenerationResult], model: str, text: Text) -> dict[str, object]:
    results = [samples[request.id] for request in item.requests]
    texts = [generated_text(text, result, item.line.sampling) for result in results]
    return answer(item.line, model, results, texts, text.token, echo_of(text, item.line, item.requests[0]))


def public_name(model: str) -> str:
    """A hub id, or the last part of a path: answers are shared, folders of this machine are not."""
    return Path(model).resolve().name if Path(model).exists() else without_logins(model)
