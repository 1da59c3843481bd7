"""A batch job as its user gives it, and the cell it runs as."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from harness import registry
from harness.api import Engine, HarnessError, Job, LocalModel, RunSpec
from harness.api.task import Questions
from harness.common.files import os_errors
from harness.common.host_memory import free_memory
from harness.suite.config import load_cell

#: Sections of a cell that --set may override, and the share of free memory that is the default of --memory.
_SECTIONS = ("model", "options", "policy", "limits")
_FREE_SHARE = 0.8


class Progress(Protocol):
    """Shows how a job goes; see harness/cli/job_progress.py."""

    def note(self, text: str) -> None: ...
    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


@dataclass(frozen=True)
class BatchJob:
    """The options of `harness generate`.

    `memory` is a size such as 6GiB, None for most of what is free; `overrides` are `key=value` pairs over policy,
    limits, options or model. `max_tokens` and `seed` apply to lines without their own. `fresh` sets earlier answers
    aside; `dry_run` stops before anything is written or loaded.
    """

    model: str
    engine: str
    memory: str | None
    overrides: tuple[str, ...]
    source: Path
    output: Path
    cache: Path
    max_tokens: int
    seed: int = 0
    fresh: bool = False
    dry_run: bool = False


def job_cell(
    model: str, engine: str, memory: str | None, overrides: Sequence[str], note: Callable[[str], None]
) -> RunSpec:
    """The cell of a job: the engine's policy for batches, a memory limit, and the overrides.

    `note` is told the limit where the user set none. Raises HarnessError for settings that are unknown, malformed or
    without effect in a job.
    """
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SECTIONS:
            raise HarnessError(f"--set {override}: a job has no {section!r}; it has {', '.join(_SECTIONS)}")
    capabilities = registry.make_engine(engine, {}).capabilities()
    policy = capabilities.batch_policy
    if memory is None:
        memory = f"{int(_FREE_SHARE * free_memory()) >> 20}MiB"
        note(f"memory limit: {memory} (set it by --memory)")
    settings = {
        "engine": engine,
        "model": {"id": model},
        "policy": {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) != f.default},
        "limits": {"host_memory": memory},
        "workload": {"prompt_len": 1, "gen_len": 1},  # a cell needs one; a job's requests come from its input
    }
    cell = load_cell(settings, overrides)
    if cell.tune != "none" or cell.candidates:
        raise HarnessError("policy: a job has no search for the largest batch; set policy.gpu_batch_size")
    capabilities.require_device(cell)
    return cell


@contextmanager
def loaded_engine(
    cell: RunSpec, model: LocalModel, cache: Path, questions: Questions, note: Callable[[str], None],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Engine]:  # fmt: skip
    """A cell's engine, loaded for sequences as long as those of `questions`.

    `note` takes what the engine says of the load. In the end the engine is closed, and its scratch folder under `cache`
    removed. Raises InfeasibleError where the engine refuses the limits, HarnessError where the cache cannot be written,
    and whatever else an engine raises.
    """
    with os_errors(f"cannot write {cache}", "choose another --cache-dir"):
        cache.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix="harness-job-", dir=cache)
    with scratch, closing(registry.make_engine(cell.engine, dict(cell.options))) as engine:
        job = Job(Path(scratch.name), cache, questions.max_sequence, max(1, questions.mean_sequence), on_progress)
        for text in engine.load(model, cell.policy, cell.limits, job).notes:
            note(text)
        yield engine
