"""The input of a batch job: for each line its requests, or the reason why it cannot be run."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from harness.api import GenerationRequest, HarnessError, ModelShape
from harness.api.task import Text
from harness.batch.answer_file import Answered
from harness.batch.format import BatchLine, LineError, parse_line
from harness.batch.job import STDIO, BatchJob, Progress
from harness.batch.texts import requests_of
from harness.common.files import os_errors
from harness.common.regular_file import open_regular

#: The most bytes of a line, and of what is read of a longer one at once.
_MAX_LINE, _PIECE = 16 << 20, 1 << 20


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

        def reason(item: Ready) -> str:
            too_long = f"{item.tokens} tokens (prompt and new) are too long for the memory limit{why}"
            return too_long if item.tokens > longest else ""

        self.refuse(reason)

    def refuse(self, reason: Callable[[Ready], str]) -> None:
        """Refuses the lines to run for which there is a reason."""
        ready, self.ready = self.ready, []
        for item in ready:
            if why := reason(item):
                self.refused.append(Refused(item.line.number, item.digest, item.line.id, why))
            else:
                self.ready.append(item)


def read(job: BatchJob, shape: ModelShape, text: Text, answered: Mapping[int, Answered], progress: Progress) -> Lines:
    """Reads the input and sorts its lines by what is to be done; `answered` are the lines of the output so far.

    Raises HarnessError for an input that cannot be read, and where `answered` belongs to another input.
    """
    lines = Lines()
    ids: dict[str, int] = {}
    tokens: dict[int, int] = {}  # one object for each id: millions of prompts' own would take several times the memory
    seen = set()
    for number, raw, position, size in _raw_lines(job):
        seen.add(number)
        digest = hashlib.blake2b(f"{job.max_tokens} {job.seed} ".encode() + raw, digest_size=8).hexdigest()
        parsed = _parsed(job, number, raw, digest, ids)
        before = answered.get(number)
        if before is not None and not before.refused:
            if before.digest != digest:
                raise HarnessError(_other_input(job, number))
            lines.settled[number] = before
            continue
        item = _tokenized(parsed, digest, shape, text, tokens) if isinstance(parsed, BatchLine) else parsed
        if isinstance(item, Ready):
            lines.ready.append(item)
        elif before is None:
            lines.refused.append(item)
        else:
            lines.settled[number] = before
        if size:
            progress.advance("reading", position, size)
    if missing := sorted(set(answered) - seen):
        raise HarnessError(_other_input(job, missing[0]))
    return lines


def _raw_lines(job: BatchJob) -> Iterator[tuple[int, bytes, int, int]]:
    """Number, content, end position and file size for every line that is not blank; of stdin no size is known, 0. Of a
    line that is too long only its first `_MAX_LINE` + 1 bytes come."""
    with os_errors(f"{job.source_name} cannot be read"), _opened(job.source) as file:
        size = 0 if job.source == STDIO else os.fstat(file.fileno()).st_size
        number = position = 0
        while raw := file.readline(_MAX_LINE + 1):
            number += 1
            position += len(raw)
            content = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
            if len(raw) > _MAX_LINE:
                content = raw
                while not raw.endswith(b"\n") and (raw := file.readline(_PIECE)):
                    position += len(raw)
            if content:
                yield number, content, position, size


def _opened(source: Path) -> AbstractContextManager[IO[bytes]]:
    if source != STDIO:
        return open_regular(source)
    if sys.stdin is None:
        raise HarnessError("stdin is closed; give a file by --input")
    return nullcontext(sys.stdin.buffer)


def _parsed(job: BatchJob, number: int, raw: bytes, digest: str, ids: dict[str, int]) -> BatchLine | Refused:
    """The request on a line; `ids` are the custom_ids of earlier lines, to which this line's is added."""
    if len(raw) > _MAX_LINE:
        return Refused(number, digest, None, f"has more than {_MAX_LINE >> 20} MiB, too long for a request")
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


def _tokenized(
    line: BatchLine, digest: str, shape: ModelShape, text: Text, tokens: dict[int, int]
) -> Ready | Refused:  # fmt: skip
    """A line's requests, whose token ids are those of `tokens`, to which new ones are added."""
    try:
        requests = requests_of(line, shape, text)
    except HarnessError as exc:
        return Refused(line.number, digest, line.id, str(exc))
    prompt = tuple(tokens.setdefault(token, token) for token in requests[0].prompt)
    if not isinstance(line.prompt, str):
        line = replace(line, prompt=prompt if line.prompt else ())
    return Ready(line, digest, tuple(replace(request, prompt=prompt) for request in requests))


def _other_input(job: BatchJob, number: int) -> str:
    return (
        f"{job.output} answers another input than {job.source_name}, or the same one under another --max-tokens or "
        f"--seed: they differ in line {number}; choose another --output, or --fresh to set the old answers aside"
    )
