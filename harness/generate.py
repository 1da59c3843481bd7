"""A batch job: requests from a file through an engine into a file of answers, resumable at any point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from harness import registry
from harness.answer_file import Answered, AnswerFile, answered
from harness.api import Engine, GenerationRequest, GenerationResult, HarnessError, Job, LocalModel, RunSpec
from harness.batch_format import BatchLine, LineError, answer, parse_line, refusal
from harness.config import load_cell
from harness.launchers.memory import free_memory

#: So that the seeds of a request's samples are far apart.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64
#: Lines that are reported one by one.
_REPORTED = 20
#: What may be overridden, and of the free memory the part that the model's work gets by default.
_SETTABLE = ("model", "options", "policy", "limits")
_FREE_SHARE = 0.8


class Text(Protocol):
    """A model's tokenizer; see engines/text.py."""

    def problem(self) -> str: ...
    def encode(self, prompt: str) -> tuple[int, ...]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def token(self, token: int) -> str: ...


class Progress(Protocol):
    """Who is told how a job goes; see job_progress.py."""

    def note(self, text: str) -> None: ...
    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


@dataclass(frozen=True)
class BatchJob:
    """What to generate and how: engine, model, policy and limits are the cell's.

    `max_tokens` and `seed` are for lines that say nothing of them. `fresh` sets earlier answers aside.
    """

    cell: RunSpec
    source: Path
    output: Path
    cache: Path
    max_tokens: int
    seed: int = 0
    fresh: bool = False


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


@dataclass(frozen=True)
class _Prepared:
    """A line ready to run: a request for each of its samples."""

    line: BatchLine
    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True)
class _Refused:
    """A line that cannot be run, and why."""

    number: int
    id: str | None
    reason: str


def cell(model: str, engine: str, memory: str | None, overrides: Sequence[str], progress: Progress) -> RunSpec:
    """What a job runs on: `memory` for the model's work or most of what is free, under `overrides` as of a suite.

    Raises HarnessError for what is unknown, malformed or of no effect here.
    """
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SETTABLE:
            raise HarnessError(f"--set {override}: a job has no {section!r}; it has {', '.join(_SETTABLE)}")
    policy = registry.make_engine(engine, {}).capabilities().batch_policy
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
    return load_cell(settings, overrides)


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

    Lines answered by an earlier run of the same job are left as they are. A line that cannot be run is answered with
    the reason. Raises HarnessError where nothing can be run or written, and what `Engine.load` raises.
    """
    if job.source.resolve() == job.output.resolve():
        raise HarnessError(f"{job.source} cannot be both --input and --output")
    engine = registry.make_engine(job.cell.engine, dict(job.cell.options))
    model = registry.prepare_model(
        job.cell.engine, job.cell.model, job.cache, lambda done, total: progress.advance("preparing", done, total)
    )
    text: Text = registry.text(job.cell.engine, model)
    if problem := text.problem():
        progress.note(problem)
    if dry:
        done = {} if job.fresh else answered(job.output, model.digest)
        return _tally(_prepared(job, model, text, done, progress), done)
    with AnswerFile(job.output, model.digest, job.fresh) as output:
        items = _prepared(job, model, text, output.done, progress)
        tally = _tally(items, output.done)
        for item in items:
            if isinstance(item, _Refused):
                output.write(refusal(item.number, item.id, item.reason))
        prepared = [item for item in items if isinstance(item, _Prepared)]
        if prepared:
            with _loaded(engine, job, model, tally, sum(len(p.requests) for p in prepared), progress):
                _generate(engine, prepared, _name(job.cell.model.id), text, output, progress)
    return tally


# --------------------------------------------------------------------------- from lines to requests


def _prepared(
    job: BatchJob, model: LocalModel, text: Text, done: Mapping[int, Answered], progress: Progress
) -> list[_Prepared | _Refused]:
    """What is to be done for each line that is not answered yet; says which lines are refused."""
    items: list[_Prepared | _Refused] = []
    ids: dict[str, int] = {}
    seen, refused = set(), 0
    for number, raw, position, size in _lines(job.source):
        seen.add(number)
        parsed = _parsed(job, number, raw, ids)
        if number in done:
            if done[number].id != parsed.id:
                raise HarnessError(_other_input(job, number))
            continue
        item = _encoded(parsed, model, text) if isinstance(parsed, BatchLine) else parsed
        if isinstance(item, _Refused):
            refused += 1
            if refused <= _REPORTED:
                progress.note(f"{job.source}:{number}: {item.reason}")
        items.append(item)
        progress.advance("reading", position, size)
    if refused > _REPORTED:
        progress.note(f"... and {refused - _REPORTED} more lines that cannot be run")
    if missing := sorted(set(done) - seen):
        raise HarnessError(_other_input(job, missing[0]))
    return items


def _lines(source: Path) -> Iterator[tuple[int, bytes, int, int]]:
    """Number, content, and position in the file and its size, of every line that is not blank."""
    try:
        with source.open("rb") as file:
            size, position = source.stat().st_size, 0
            for number, raw in enumerate(file, 1):
                position += len(raw)
                content = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if content:
                    yield number, content, position, size
    except OSError as exc:
        raise HarnessError(f"{source} cannot be read: {exc.strerror or exc}") from exc


def _parsed(job: BatchJob, number: int, raw: bytes, ids: dict[str, int]) -> BatchLine | _Refused:
    """The request on a line; `ids` are those of earlier lines, to which its own is added."""
    try:
        if job.source.suffix == ".txt":
            raw = json.dumps({"prompt": raw.decode()}).encode()
        line = parse_line(raw, number, job.max_tokens, job.seed)
    except UnicodeDecodeError as exc:
        return _Refused(number, None, f"is not UTF-8 text (byte {exc.start + 1})")
    except LineError as exc:
        return _Refused(number, exc.id, str(exc))
    if line.id is not None and ids.setdefault(line.id, number) != number:
        return _Refused(number, line.id, f"custom_id {line.id!r} was used on line {ids[line.id]}")
    return line


def _encoded(line: BatchLine, model: LocalModel, text: Text) -> _Prepared | _Refused:
    sampling = line.sampling
    try:
        ids = line.prompt
        if line.messages:
            ids = text.encode_chat(line.messages)
        elif isinstance(ids, str):
            ids = text.encode(ids)
        requests = tuple(
            GenerationRequest(f"{line.number}.{i}", tuple(ids), replace(sampling, seed=_seed(sampling.seed, i)))
            for i in range(line.samples)
        )
        registry.check_request(requests[0], model.shape)
    except HarnessError as exc:
        return _Refused(line.number, line.id, str(exc).removeprefix(f"request {line.number}.0: "))
    return _Prepared(line, requests)


def _name(model: str) -> str:
    """A hub id, or a folder's or file's own name: answers are for others to read too."""
    return Path(model).resolve().name if Path(model).exists() else model


def _seed(seed: int | None, sample: int) -> int | None:
    return seed if seed is None or not sample else (seed + sample * _SEED_STEP) % _SEEDS


def _other_input(job: BatchJob, number: int) -> str:
    return (
        f"{job.output} answers another input than {job.source}: they differ in line {number}; "
        "choose another --output, or --fresh to set the old answers aside"
    )


def _tally(items: Sequence[_Prepared | _Refused], done: Mapping[int, Answered]) -> Tally:
    lines = [item for item in items if isinstance(item, _Prepared)]
    requests = [request for line in lines for request in line.requests]
    lengths = [(len(r.prompt), r.sampling.max_tokens) for r in requests]
    return Tally(
        lines=len(items) + len(done),
        answered_before=sum(not a.refused for a in done.values()),
        refused_before=sum(a.refused for a in done.values()),
        refused=len(items) - len(lines),
        to_run=len(lines),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        new_tokens=sum(new for _, new in lengths),
        longest=max((prompt + new for prompt, new in lengths), default=0),
    )


# --------------------------------------------------------------------------- from requests to answers


@contextmanager
def _loaded(
    engine: Engine, job: BatchJob, model: LocalModel, tally: Tally, requests: int, progress: Progress
) -> Iterator[None]:
    try:
        job.cache.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise HarnessError(f"cannot write {job.cache}: {exc.strerror or exc}; choose another --cache-dir") from exc
    policy = replace(job.cell.policy, gpu_batch_size=min(job.cell.policy.gpu_batch_size, requests))
    with TemporaryDirectory(prefix="harness-generate-", dir=job.cache) as scratch:
        mean = (tally.prompt_tokens + tally.new_tokens // 2) // requests
        work = Job(
            Path(scratch), job.cache, tally.longest, max(1, mean),
            lambda done, total: progress.advance("loading", done, total),
        )  # fmt: skip
        progress.note(f"loading {job.cell.model.id} in {job.cell.engine}")
        try:
            for note in engine.load(model, policy, job.cell.limits, work).notes:
                progress.note(note)
            yield
        finally:
            engine.close()


def _generate(
    engine: Engine, prepared: Sequence[_Prepared], name: str, text: Text, output: AnswerFile, progress: Progress
) -> None:
    """Writes each line's answer when the last of its samples is there."""
    owners = {request.id: item for item in prepared for request in item.requests}
    parts: dict[int, dict[str, GenerationResult]] = {}
    finished = tokens = 0
    for result in engine.generate([request for item in prepared for request in item.requests]):
        item = owners[result.id]
        tokens += len(result.tokens)
        have = parts.setdefault(item.line.number, {})
        have[result.id] = result
        if len(have) == len(item.requests):
            results = [have[request.id] for request in item.requests]
            texts = [_generated_text(text, r, item.line.sampling.stop) for r in results]
            output.write(answer(item.line, name, results, texts, text.token))
            del parts[item.line.number]
            finished += 1
        progress.advance("generating", finished, len(prepared), tokens)
    if shared := engine.trace().metrics.get("shared_prompt_tokens"):
        total = sum(len(request.prompt) for item in prepared for request in item.requests)
        progress.note(f"{shared:.0f} of {total} prompt tokens were those of an earlier request, and not computed again")


def _generated_text(text: Text, result: GenerationResult, stops: Sequence[str]) -> str:
    """Up to the first stop string, which is not part of it."""
    whole = text.decode(result.tokens)
    found = [position for stop in stops if (position := whole.find(stop)) >= 0]
    return whole[: min(found)] if found and result.finish_reason == "stop" else whole
