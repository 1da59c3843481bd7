"""The input of a batch job: for each line its requests, or the reason why it cannot be run."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.api import GenerationRequest, HarnessError, ModelShape
from harness.api.task import Text
from harness.batch.answer_file import Answered
from harness.batch.format import BatchLine, LineError, parse_line
from harness.batch.job import BatchJob, Progress
from harness.common.files import os_errors

#: Between the seeds of a request's samples, so that they lie far apart: 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Ready:
    """A line that can be run: one request per sample. `digest` identifies the line's content and the job's defaults."""

    line: BatchLine
    digest: str
    requests: tuple[GenerationRequest, ...]

    @property
    def tokens(self) -> int:
        """The most tokens of one of its sequences, prompt and new ones."""
        return len(self.requests[0].prompt) + self.requests[0].sampling.max_tokens


@dataclass(frozen=True)
class Refused:
    """A line that cannot be run, and why."""

    number: int
    digest: str
    id: str | None
    reason: str


@dataclass
class Lines:
    """A job's lines: to run, newly refused, and settled by an earlier run (by line number).

    Lines that an earlier run refused are `ready` if they can be run now, else `settled`.
    """

    ready: list[Ready] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    settled: dict[int, Answered] = field(default_factory=dict)

    @property
    def requests(self) -> list[GenerationRequest]:
        """The requests to run."""
        return [request for item in self.ready for request in item.requests]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts to run."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def new_tokens(self) -> int:
        """The most tokens that there are to generate."""
        return sum(request.sampling.max_tokens for request in self.requests)

    def refuse_longer(self, longest: int, why: str) -> None:
        """Refuses the lines to run that have more than `longest` tokens; `why` ends their reason."""
        for item in self.ready:
            if item.tokens > longest:
                reason = f"{item.tokens} tokens (prompt and new) are too long for the memory limit{why}"
                self.refused.append(Refused(item.line.number, item.digest, item.line.id, reason))
        self.ready = [item for item in self.ready if item.tokens <= longest]


def read(job: BatchJob, shape: ModelShape, text: Text, answered: Mapping[int, Answered], progress: Progress) -> Lines:
    """Reads the input and sorts its lines by what is to be done; `answered` are the lines of the output so far.

    Raises HarnessError for an input that cannot be read, and where `answered` belongs to another input.
    """
    lines = Lines()
    ids: dict[str, int] = {}
    seen = set()
    for number, raw, position, size in _raw_lines(job.source):
        seen.add(number)
        digest = hashlib.blake2b(f"{job.max_tokens} {job.seed} ".encode() + raw, digest_size=8).hexdigest()
        parsed = _parsed(job, number, raw, digest, ids)
        before = answered.get(number)
        if before is not None and not before.refused:
            if before.digest != digest:
                raise HarnessError(_other_input(job, number))
            lines.settled[number] = before
            continue
        item = _tokenized(parsed, digest, shape, text) if isinstance(parsed, BatchLine) else parsed
        if isinstance(item, Ready):
            lines.ready.append(item)
        elif before is None:
            lines.refused.append(item)
        else:
            lines.settled[number] = before
        progress.advance("reading", position, size)
    if missing := sorted(set(answered) - seen):
        raise HarnessError(_other_input(job, missing[0]))
    return lines


def _raw_lines(source: Path) -> Iterator[tuple[int, bytes, int, int]]:
    """Number, content, end position and file size for every line that is not blank."""
    with os_errors(f"{source} cannot be read"), source.open("rb") as file:
        size, position = source.stat().st_size, 0
        for number, raw in enumerate(file, 1):
            position += len(raw)
            content = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
            if content:
                yield number, content, position, size


def _parsed(job: BatchJob, number: int, raw: bytes, digest: str, ids: dict[str, int]) -> BatchLine | Refused:
    """The request on a line; `ids` are the custom_ids of earlier lines, to which this line's is added."""
    try:
        if job.source.suffix == ".txt":
            raw = json.dumps({"prompt": raw.decode()}).encode()
        line = parse_line(raw, number, job.max_tokens, job.seed)
    except UnicodeDecodeError as exc:
        return Refused(number, digest, None, f"is not UTF-8 text (byte {exc.start + 1})")
    except LineError as exc:
        return Refused(number, digest, exc.id, str(exc))
    if line.id is not None and ids.setdefault(line.id, number) != number:
        return Refused(number, digest, line.id, f"custom_id {line.id!r} was used on line {ids[line.id]}")
    return line


def _tokenized(line: BatchLine, digest: str, shape: ModelShape, text: Text) -> Ready | Refused:
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
        requests[0].require_valid(shape)
    except HarnessError as exc:
        return Refused(line.number, digest, line.id, str(exc).removeprefix(f"request {line.number}.0: "))
    return Ready(line, digest, requests)


def _seed(seed: int | None, sample: int) -> int | None:
    return seed if seed is None or not sample else (seed + sample * _SEED_STEP) % _SEEDS


def _other_input(job: BatchJob, number: int) -> str:
    return (
        f"{job.output} answers another input than {job.source}, or the same one under another --max-tokens or --seed: "
        f"they differ in line {number}; choose another --output, or --fresh to set the old answers aside"
    )
