"""The lines of a batch job's input: each a request ready to run, or the reason why it cannot be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import registry
from harness.api import GenerationRequest, HarnessError, ModelShape, RunSpec
from harness.batch.answer_file import Answered
from harness.batch.format import BatchLine, LineError, parse_line

#: So that the seeds of a request's samples are far apart.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64


class Text(Protocol):
    """A model's tokenizer; see engines/common/text.py."""

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
class Ready:
    """A line ready to run: a request for each of its samples. `asked`: a digest of what it asks for."""

    line: BatchLine
    asked: str
    requests: tuple[GenerationRequest, ...]

    @property
    def tokens(self) -> int:
        """Those of one of its sequences, at most: prompt and new ones."""
        return len(self.requests[0].prompt) + self.requests[0].sampling.max_tokens

    def refused(self, reason: str) -> Refused:
        """The line as one that cannot be run after all."""
        return Refused(self.line.number, self.asked, self.line.id, reason)


@dataclass(frozen=True)
class Refused:
    """A line that cannot be run, and why."""

    number: int
    asked: str
    id: str | None
    reason: str


def read(
    job: BatchJob, shape: ModelShape, text: Text, done: Mapping[int, Answered], progress: Progress
) -> tuple[list[Ready], list[Refused]]:
    """The lines that are not answered yet. Of those refused before, the ones that can be run now are ready.

    Raises HarnessError where `done` are the answers of another input.
    """
    ready: list[Ready] = []
    refused: list[Refused] = []
    ids: dict[str, int] = {}
    seen = set()
    for number, raw, position, size in _lines(job.source):
        seen.add(number)
        asked = hashlib.blake2b(f"{job.max_tokens} {job.seed} ".encode() + raw, digest_size=8).hexdigest()
        before = done.get(number)
        parsed = _parsed(job, number, raw, asked, ids)
        if before is not None and not before.refused:
            if before.asked != asked:
                raise HarnessError(_other_input(job, number))
            continue
        item = _encoded(parsed, asked, shape, text) if isinstance(parsed, BatchLine) else parsed
        if isinstance(item, Ready):
            ready.append(item)
        elif before is None:
            refused.append(item)
        progress.advance("reading", position, size)
    if missing := sorted(set(done) - seen):
        raise HarnessError(_other_input(job, missing[0]))
    return ready, refused


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


def _parsed(job: BatchJob, number: int, raw: bytes, asked: str, ids: dict[str, int]) -> BatchLine | Refused:
    """The request on a line; `ids` are those of earlier lines, to which its own is added."""
    try:
        if job.source.suffix == ".txt":
            raw = json.dumps({"prompt": raw.decode()}).encode()
        line = parse_line(raw, number, job.max_tokens, job.seed)
    except UnicodeDecodeError as exc:
        return Refused(number, asked, None, f"is not UTF-8 text (byte {exc.start + 1})")
    except LineError as exc:
        return Refused(number, asked, exc.id, str(exc))
    if line.id is not None and ids.setdefault(line.id, number) != number:
        return Refused(number, asked, line.id, f"custom_id {line.id!r} was used on line {ids[line.id]}")
    return line


def _encoded(line: BatchLine, asked: str, shape: ModelShape, text: Text) -> Ready | Refused:
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
        registry.request_checks().validate(requests[0], shape)
    except HarnessError as exc:
        return Refused(line.number, asked, line.id, str(exc).removeprefix(f"request {line.number}.0: "))
    return Ready(line, asked, requests)


def _seed(seed: int | None, sample: int) -> int | None:
    return seed if seed is None or not sample else (seed + sample * _SEED_STEP) % _SEEDS


def _other_input(job: BatchJob, number: int) -> str:
    return (
        f"{job.output} answers another input than {job.source}, or the same one under another --max-tokens or --seed: "
        f"they differ in line {number}; choose another --output, or --fresh to set the old answers aside"
    )
