"""`harness generate --prompt`: one prompt, answered as its tokens come."""

import gc
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.batch.format import parse_line
from harness.batch.job import Progress, engine_errors, job_cell
from harness.batch.session import ModelSession
from harness.batch.stream import Streamed
from harness.common.scratch import remove_abandoned


@dataclass(frozen=True)
class PromptJob:
    """The options of one prompt; `chat` sends it as a user's message by the model's chat template."""

    model: str
    engine: str
    memory: str | None
    overrides: tuple[str, ...]
    prompt: str
    chat: bool
    max_tokens: int
    seed: int
    cache: Path


@contextmanager
def opened(job: PromptJob, progress: Progress) -> Iterator[Streamed]:
    """The answer, ready to be streamed: the model is loaded for this prompt.

    Says nothing but how far a load is. Raises HarnessError for a prompt that cannot be run, InfeasibleError where the
    memory is too small for it.
    """

    def quiet(text: str) -> None: ...

    cell = job_cell(job.model, job.engine, job.memory, job.overrides, quiet)
    given = {"messages": [{"role": "user", "content": job.prompt}]} if job.chat else {"prompt": job.prompt}
    line = parse_line(json.dumps(given).encode(), 1, job.max_tokens, job.seed)
    remove_abandoned(job.cache)
    with closing(ModelSession(cell, job.cache, progress, quiet)) as session:
        request = session.request(line)
        with engine_errors(cell.engine):
            engine = session.engine_for([(len(request.prompt), request.sampling.max_tokens)])
        gc.freeze()  # closing an engine collects, and the process ends after this prompt
        yield Streamed(session, line, engine, request)
