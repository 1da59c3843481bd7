"""Reads run directories (records.jsonl and the suite's description), and names the cells of records."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.api import HarnessError, RunRecord, RunSpec, parse_record, to_json
from harness.common.regular_file import lines_of, open_regular, read_regular
from reports.environment import numbered_machines
from reports.text import flat, grouped, one_line

#: The most of a log's end that a report shows.
_TAIL_BYTES, _TAIL_LINES = 8000, 30
#: The most of a suite's copy that is read.
_SUITE_BYTES = 1 << 20
#: Words of a command that need no quotes, placeholders of folders such as $HOME among them.
_PLAIN_WORD = re.compile(r"(?:[A-Za-z0-9_@%+=:,./-]|\$[A-Z]+)+")
RECORDS = "records.jsonl"
SUITE = "suite.yaml"


@dataclass(frozen=True)
class Runs:
    """The content of run directories: records in order of first appearance, and notes for the reader."""

    records: tuple[RunRecord, ...]
    descriptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reproduces: frozenset[str] = frozenset()  # published tables that the suites reproduce
    folders: Mapping[tuple[str, int, str], Path] = field(default_factory=dict)  # run directories by `_launch`
    machines: Mapping[Path, int | None] = field(default_factory=dict)  # numbers of the directories' machines
    retried: tuple[RunRecord, ...] = ()  # failed launches that a later record of the same repeat replaces

    @property
    def launches(self) -> tuple[RunRecord, ...]:
        """All launches, including failed ones that a retry replaced."""
        return (*self.records, *self.retried)

    @property
    def by_machine(self) -> list[list[RunRecord]]:
        """The records of the run directories of each machine: figures of two machines are not comparable."""
        return list(grouped(self.records, lambda r: self.machines.get(self.folders.get(_launch(r), Path()))).values())

    def log_tail(self, record: RunRecord) -> str:
        """The last lines of a record's log; empty where the run directory no longer has it."""
        folder = self.folders.get(_launch(record))
        if folder is None or not record.log:
            return ""
        try:
            path = (folder / record.log).resolve()
            if not path.is_relative_to(folder.resolve()):  # a record is untrusted and may name any path
                return ""
            with open_regular(path) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return "\n".join(file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:])
        except (OSError, ValueError, RuntimeError):  # also for invalid names and circular links
            return ""


def load_records(dirs: Sequence[Path]) -> list[RunRecord]:
    """The records of run directories, one per cell, repeat and machine: the last one wins. Raises as `read_runs`."""
    return list(read_runs(dirs).records)


def read_runs(dirs: Sequence[Path]) -> Runs:
    """Reads `records.jsonl` and, if present, `suite.yaml` of each directory.

    Skips a last line that a crash cut off, and beside run directories other files and folders, such as a shell's *
    names, each with a note. Raises HarnessError where nothing has records, for a damaged line, and for a schema newer
    than this program's.
    """
    if not dirs:
        raise HarnessError("no run directory given; name one that `harness run` wrote")
    notes: list[str] = []
    descriptions: list[str] = []
    latest: dict[tuple[str, int, int | None], RunRecord] = {}
    folders: dict[tuple[str, int, str], Path] = {}
    reproduces: set[str] = set()
    retried: list[RunRecord] = []
    total = disturbed = 0
    read = {folder: _read_folder(folder, notes) for folder in _with_records(dirs, notes)}
    machines = dict(zip(read, numbered_machines(read.values()), strict=True))
    for folder, records in read.items():
        total += len(records)
        in_folder: dict[tuple[str, int, int | None], RunRecord] = {}
        for record in records:
            key = record.fingerprint, record.repeat, machines[folder]
            before = in_folder.get(key)
            relabelled = before is not None and before.started_at == record.started_at  # not another launch
            if before is not None and not relabelled and _failed(before):
                retried.append(before)
            disturbed += key in latest and latest[key].status == "ok" and latest[key].disturbed
            in_folder[key] = latest[key] = record
            folders[_launch(record)] = folder
        suite = _suite(folder / SUITE, notes)
        description, table = suite.get("description"), suite.get("reproduces")
        if isinstance(description, str) and description and description not in descriptions:
            descriptions.append(description)
        reproduces |= {table} if isinstance(table, str) else set()
    if superseded := total - len(latest):
        why = f", {disturbed} because others disturbed the launch" if disturbed else ""
        notes.append(
            f"Skipped {superseded} of {total} records: a later record of the same cell and repeat replaces them{why}."
        )
    return Runs(
        tuple(latest.values()), tuple(descriptions), tuple(notes), frozenset(reproduces), folders, machines,
        tuple(retried),
    )  # fmt: skip


def _failed(record: RunRecord) -> bool:
    """Whether a launch that was replaced failed; not where it told a search to go on with less."""
    searched = bool(record.spec.tune == "max_batch" or record.spec.candidates)
    no_memory = record.status in ("oom_host", "oom_device")
    return record.status not in ("ok", "interrupted") and not (searched and no_memory)


def _launch(record: RunRecord) -> tuple[str, int, str]:
    return record.fingerprint, record.repeat, record.started_at


def name_of(record: RunRecord) -> str:
    """The cell's name in the suite, or else its engine's name."""
    return one_line(record.spec.name) or one_line(record.spec.engine)


def workload_of(record: RunRecord) -> str:
    """The model and the workload as text; cells with the same text are comparable."""
    model = record.spec.model
    details = [f"revision {model.revision}"] if model.revision else []
    details += ["dummy weights"] if model.weights == "dummy" else []
    details += [f"stored as {model.dtype}"] if model.dtype != "auto" else []
    name = f"{model.id} ({', '.join(details)})" if details else model.id
    return one_line(f"{name}, {record.spec.workload.words}")


def command_of(record: RunRecord) -> str:
    """The command that repeats a record's cell, quoted anew: whoever copies it runs `harness run` and nothing else.

    Empty for any other command.
    """
    try:
        words = shlex.split(one_line(record.command))
    except ValueError:  # quotes that do not end
        return ""
    if words[:2] != ["harness", "run"]:
        return ""
    return " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in words)


def settings_of(spec: RunSpec) -> dict[str, object]:
    """Settings by path, such as `policy.schedule`."""
    return flat(to_json(spec))


def _with_records(dirs: Sequence[Path], notes: list[str]) -> list[Path]:
    """The directories that have records; all of them if none has, so that reading says what is wrong."""
    others = [folder for folder in dirs if _lacks_records(folder)]
    if len(others) == len(dirs):
        return list(dirs)
    notes.extend(f"Skipped {folder}: it has no {RECORDS}." for folder in others)
    return [folder for folder in dirs if folder not in others]


def _lacks_records(path: Path) -> bool:
    try:
        return path.exists() and not (path / RECORDS).exists() and not (path / RECORDS).is_symlink()
    except (OSError, ValueError):  # reading it says what is wrong
        return False


def _read_folder(folder: Path, notes: list[str]) -> list[RunRecord]:
    path = folder / RECORDS
    records = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines_of(file), 1):
                if not line.endswith(b"\n"):  # from a crash
                    notes.append(f"Skipped the last line of {path}: it is incomplete.")
                elif line.strip():
                    records.append(parse_record(line, f"{path}:{number}"))
    except FileNotFoundError as exc:
        raise HarnessError(f"{folder} has no {RECORDS}; name a directory that `harness run` wrote") from exc
    except OSError as exc:
        raise HarnessError(
            f"cannot read {path}: {exc.strerror or exc}; name a directory that `harness run` wrote"
        ) from exc
    if not records:
        raise HarnessError(f"{path} holds no complete record; run the suite again to finish at least one cell")
    return records


def _suite(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """The suite file as a mapping. The report needs only records, so a damaged suite file results in a note."""
    try:
        suite = yaml.safe_load(read_regular(path, _SUITE_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        notes.append(f"{path} cannot be read: the report lacks the suite's description.")
        return {}
    return suite if isinstance(suite, dict) else {}
