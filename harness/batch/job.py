"""A batch job as its user gives it, and the cell it runs as."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from harness import registry
from harness.api import (
    Engine,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    Job,
    LocalModel,
    OffloadPolicy,
    RefusedEvent,
    RunSpec,
)
from harness.api.machine import mean_cached_length, mean_generated
from harness.common.classify import classify
from harness.common.files import os_errors
from harness.common.host_memory import free_memory
from harness.common.packages import install
from harness.common.scratch import scratch_folder
from harness.common.system import require_linux
from harness.suite import check as suite_check
from harness.suite.config import load_cell

#: Sections of a cell that --set may override, and the share of free memory that is the default of --memory.
_SECTIONS = ("model", "options", "policy", "limits")
_FREE_SHARE = 0.8


#: Stands for stdin as an input and for stdout as an output.
STDIO = Path("-")


class Progress(Protocol):
    """Shows how a job goes; see harness/batch/progress.py."""

    def note(self, text: str) -> None: ...
    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


@dataclass(frozen=True)
class BatchJob:
    """The options of `harness generate`.

    `memory` is a size such as 6GiB, None for most of what is free; `overrides` are `key=value` pairs over policy,
    limits, options or model. `source` and `output` may be `STDIO`. `max_tokens` and `seed` apply to lines without
    their own. `fresh` sets earlier answers aside; `dry_run` stops before anything is written or loaded.
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

    @property
    def source_name(self) -> str:
        """The input in messages."""
        return "stdin" if self.source == STDIO else str(self.source)


@dataclass(frozen=True)
class Lengths:
    """What an engine is loaded for, in tokens: the longest sequence, the mean number cached over a sequence's life, and
    the mean number that one generates."""

    longest: int
    mean: int
    mean_new: int

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]]) -> "Lengths":
        """Those of sequences with so many prompt and new tokens."""
        return cls(max(map(sum, lengths)), max(1, mean_cached_length(lengths)), mean_generated(lengths))


class Answerer(Protocol):
    """What answers a job's requests once it is loaded: an engine, or workers that have one each."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterable[GenerationResult | RefusedEvent]: ...
    def trace(self) -> EngineTrace: ...


#: Loads a cell's model for sequences of some lengths, as `loaded_engine` does.
Loader = Callable[
    [RunSpec, LocalModel, Path, Lengths, Callable[[str], None], Callable[[int, int], None]],
    AbstractContextManager[Answerer],
]


def job_cell(
    model: str, engine: str, memory: str | int | None, overrides: Sequence[str], note: Callable[[str], None],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunSpec:  # fmt: skip
    """The cell of a job: the engine's policy for batches, a memory limit, and over them `settings`, sections of a cell
    as a suite has them, and the overrides.

    `note` is told the limit where the user set none. Raises HarnessError for settings that are unknown, malformed or
    without effect in a job or for its engine.
    """
    require_linux(f"engine {engine}")
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in _SECTIONS:
            known = f"it has {', '.join(_SECTIONS)}"
            raise HarnessError(f"--set {override}: a job has no {section!r}; {_meant(section) or known}")
    _require_installed(engine)
    capabilities = registry.make_engine(engine, {}).capabilities()
    policy = capabilities.batch_policy
    by_itself = memory is None
    if memory is None:
        memory = int(_FREE_SHARE * free_memory()) >> 20 << 20
    given = settings or {}
    cell = load_cell(
        {
            "engine": engine,
            "model": {"id": model, **given.get("model", {})},
            "options": given.get("options", {}),
            "policy": _set_fields(policy) | dict(given.get("policy", {})),
            "limits": {"host_memory": memory, **given.get("limits", {})},
            "workload": {"prompt_len": 1, "gen_len": 1},  # a cell needs one; a job's requests come from its input
        },
        overrides,
    )
    if by_itself and cell.limits.host_memory == memory:
        elsewhere = {"RANK", "WORLD_SIZE"} <= os.environ.keys()  # torchrun's ranks are hosts; others share this one
        of_each = memory // (1 if elsewhere else cell.policy.ranks)
        cell = replace(cell, limits=replace(cell.limits, host_memory=of_each))
        whose = "memory limit" if of_each == memory else "memory limit of each rank"
        note(f"{whose}: {of_each >> 20}MiB (set it by --memory)")
    if cell.tune != "none" or cell.candidates:
        raise HarnessError("policy: a job has no search for the largest batch; set policy.gpu_batch_size")
    capabilities.require_device(cell)
    registry.refuse(cell)
    return cell


def answered_by(cell: RunSpec, identity: str) -> str:
    """What decides a job's answers: the `identity` of its model and, of its policy, what gives digits up for speed."""
    policy = cell.policy
    lossy = {name: getattr(policy, name) for name in ("weight_bits", "kv_bits") if getattr(policy, name) != 16}
    if lossy:
        lossy |= {"group_size": policy.group_size, "weight_groups": policy.weight_groups}
    if policy.value_sparsity < 1:
        lossy["value_sparsity"] = policy.value_sparsity
    if policy.compute_dtype == "int8":
        lossy["compute_dtype"] = "int8"
    if policy.wire_bits is not None:
        lossy["wire_bits"] = policy.wire_bits
    return "-".join([identity, *(f"{name}_{value}" for name, value in sorted(lossy.items()))])


def _set_fields(policy: OffloadPolicy) -> dict[str, Any]:
    """The fields of a policy that are not at their defaults."""
    return {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) != f.default}


def _meant(section: str) -> str:
    """The option or key that a misplaced setting means; empty where none is near."""
    options = {"memory": "--memory", "max_tokens": "--max-tokens", "seed": "--seed", "engine": "--engine"}
    if near := [option for name, option in options.items() if len(section) > 2 and section in name]:
        return f"did you mean {near[0]}?"
    return suite_check.dotted_key(section, _SECTIONS)


def _require_installed(engine: str) -> None:
    """Raises HarnessError where the engine's packages are missing: a job runs in this interpreter, by no launcher."""
    entry = registry.engine_entry(engine)
    missing = entry.missing()
    if missing and not entry.extra:
        pins = registry.environment_pins(entry.environment)
        command = f"pip install -r {pins}" if pins.exists() else install(*missing)
        raise HarnessError(
            f"engine {engine} needs {', '.join(missing)} beside the harness: in a virtual environment of its own, "
            f"{command}"
        )


@contextmanager
def loaded_engine(
    cell: RunSpec, model: LocalModel, cache: Path, lengths: Lengths, note: Callable[[str], None],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Engine]:  # fmt: skip
    """A cell's engine, loaded for sequences of these lengths.

    `note` takes what the engine says of the load. In the end the engine is closed, and its scratch folder under `cache`
    removed. Raises InfeasibleError where the engine refuses the limits, HarnessError where the cache cannot be written,
    and whatever else an engine raises.
    """
    with ExitStack() as opened:
        with os_errors(f"cannot write {cache}", "choose another --cache-dir"):
            scratch = opened.enter_context(scratch_folder(cache))
        engine = opened.enter_context(closing(registry.make_engine(cell.engine, dict(cell.options))))
        job = Job(
            scratch, cache, lengths.longest, lengths.mean, on_progress, reproducible=True, mean_new=lengths.mean_new
        )
        for text in engine.load(model, cell.policy, cell.limits, job).notes:
            note(text)
        yield engine


@contextmanager
def engine_errors(engine: str) -> Iterator[None]:
    """Turns what an engine's libraries raise into a HarnessError of one line."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as exc:
        refusal = classify(exc)
        raise HarnessError(f"engine {engine} failed ({refusal.status}): {refusal.reason}") from exc
