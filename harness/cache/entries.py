"""What the cache folder holds, known by place and name: its kind, its size, its last use, and who made it."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from harness import registry
from harness.api import HarnessError
from harness.common.files import os_errors
from harness.common.locks import unused
from harness.common.scratch import WORK
from harness.launchers.venv import READY, VirtualEnvironments

Kind = Literal[
    "models", "downloads", "weights", "environments", "kernels", "answers", "data", "choices", "scratch", "other"
]
#: Of a killed process, or of one that runs; complete, but written in a way that nothing reads any more.
State = Literal["", "leftover", "in use", "outdated"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: What `build_once` and `harness cache clean` add to the name of a folder that is not, or no longer, complete.
_UNFINISHED = re.compile(r".+\.tmp-\d+")
#: What `replacing` writes before it replaces a file, and what earlier versions wrote.
_REPLACING = re.compile(r"\.(.+?)(?:\.[0-9a-f]{8})?\.\d+(?:\.tmp)?")
#: How the names of scratch folders began before they were in a folder of their own.
_OLD_SCRATCH = "harness-job-"
_CHOICES = re.compile(
    r"(contents|gemm_choices|max_batch|nano_batches)\.json|hardware-\d+\.yaml|expert_usage-[0-9a-f]{16}\.json|vega-[\w.]+\.js"
)
_MADE_BY = {
    "contents.json": "digests of files that were read",
    "gemm_choices.json": "engine offload: the fastest products",
    "max_batch.json": "harness run: batch searches",
    "nano_batches.json": "harness tune: nano-batches by model shape",
}


@dataclass(frozen=True)
class Entry:
    """A file or folder of the cache. `name`: its path in the cache; `size` in bytes; `used`: when it was last read or
    written, in seconds of the epoch, as far as the file system keeps that."""

    kind: Kind
    name: str
    path: Path
    size: int
    used: float
    made_by: str
    state: State = ""


@dataclass(frozen=True)
class _Place:
    """A folder of the cache, all of one kind. `holds`: whether a child of it is what is made there."""

    kind: Kind
    made_by: str
    holds: Callable[[Path], bool]


def _built_once(path: Path) -> bool:
    """Whether `build_once` or the launcher venv made a folder: the lock of its build stays beside it."""
    return path.is_dir() and path.with_name(f"{path.name}.lock").exists()


def _beside_its_lock(path: Path) -> bool:
    """Whether the adapter of DeepSpeed made the folder of extensions that holds this one."""
    return (path.parent / ".building").exists()


def _named(pattern: str) -> Callable[[Path], bool]:
    """Whether a name is one that is given there: a folder of that name may also be somebody else's."""
    return lambda path: re.fullmatch(pattern, path.name) is not None


_PLACES: Mapping[str, _Place] = {
    "models": _Place("models", "dummy weights, or an unpacked checkpoint", _built_once),
    "hub": _Place("downloads", "Hugging Face hub", _named("(models|datasets|spaces)--.+")),
    "offload": _Place("weights", "engine offload", _built_once),
    "gguf": _Place("weights", "engine llama_cpp", _built_once),
    "openvino": _Place("weights", "engine openvino", _built_once),
    "flexgen": _Place("weights", "engine flexgen_ref", _built_once),
    "environments": _Place("environments", "launcher venv", _built_once),
    "kernels": _Place("kernels", "engine offload", _built_once),
    "torch_extensions": _Place("kernels", "engine deepspeed_zero", _beside_its_lock),
    "vllm": _Place("kernels", "engine vllm_cpu", _named("torch_compile_cache|modelinfos")),
    "scores": _Place("answers", "harness lm-eval", _named(r"[0-9a-f]{16}\.jsonl")),
    "helm": _Place("data", "tasks of HELM", _named("scenarios")),
    WORK: _Place("scratch", "a run, a job or a calibration", _named(r"[0-9a-f]{12}|tmp\w+")),
}
#: A cache of its own, which containers write.
_NESTED = "containers"


def entries(cache: Path) -> list[Entry]:
    """Everything in the cache but locks, by kind and name. What nobody here makes is of kind `other`.

    Raises HarnessError where it cannot be read.
    """
    with os_errors(f"cannot read {cache}", "make it readable, or give another folder by --cache-dir"):
        found = list(_entries(cache, cache)) if cache.is_dir() else []
    if any(entry.state == "leftover" for entry in found) and _is_in_use(cache):
        found = [replace(entry, state="in use") if entry.state == "leftover" else entry for entry in found]
    return sorted(found, key=lambda entry: (KINDS.index(entry.kind), entry.name))


def _is_in_use(cache: Path) -> bool:
    try:
        with unused(cache):
            return False
    except HarnessError:
        return True


def _entries(cache: Path, folder: Path) -> Iterator[Entry]:
    for path in _children(folder):
        place = _PLACES.get(path.name)
        if place is not None and path.is_dir():
            yield from _in_place(cache, path, place)
        elif path.name == _NESTED and folder == cache and path.is_dir():
            yield from _entries(cache, path)
        elif path.is_dir() and path.name.startswith(_OLD_SCRATCH):
            yield _entry(cache, path, "scratch", "a job", "leftover")
        elif (replacing := _REPLACING.fullmatch(path.name)) and _CHOICES.fullmatch(replacing[1]):
            yield _entry(cache, path, "choices", "a file that was to be replaced", "leftover")
        elif _CHOICES.fullmatch(path.name) and path.is_file():
            yield _entry(cache, path, "choices", _made_by(path.name))
        else:
            yield _entry(cache, path, "other", "")


def _in_place(cache: Path, folder: Path, place: _Place) -> Iterator[Entry]:
    current = _current_environments() if place.kind == "environments" else frozenset()
    for path in _children(folder):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir():
            yield _entry(cache, path, place.kind, place.made_by, "leftover")
        elif place.kind == "environments" and path.name.startswith("code-"):
            continue  # links to this code
        elif path.is_symlink() or not place.holds(path):
            yield _entry(cache, path, "other", "")
        elif place.kind == "scratch":
            yield _entry(cache, path, place.kind, place.made_by, "leftover")
        elif place.kind == "environments":
            state: State = "" if path.name in current else "outdated"
            yield _entry(cache, path, place.kind, place.made_by, state if (path / READY).exists() else "leftover")
        else:
            outdated = folder.name == "offload" and registry.converted_weights().is_outdated(path)
            yield _entry(cache, path, place.kind, place.made_by, "outdated" if outdated else "")


def _children(folder: Path) -> Iterator[Path]:
    """What is in a folder, without locks and without what hides, such as the hub client's own locks."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and not _REPLACING.fullmatch(path.name)
        if not hidden and path.suffix != ".lock":
            yield path


def _current_environments() -> frozenset[str]:
    """The names of the environments that a run would use now."""
    names = {entry.environment for entry in registry.engines().values() if entry.environment}
    pinned = (name for name in names if registry.environment_pins(name).exists())
    return frozenset(map(VirtualEnvironments.identity, pinned))


def _made_by(name: str) -> str:
    beginnings = {
        "hardware": "harness calibrate: rates of this machine",
        "expert_usage": "engine offload: how often experts were used",
        "vega": "reports: the chart library",
    }
    return _MADE_BY.get(name) or next(words for start, words in beginnings.items() if name.startswith(start))


def _entry(cache: Path, path: Path, kind: Kind, made_by: str, state: State = "") -> Entry:
    size, used = _measured(path)
    return Entry(kind, path.relative_to(cache).as_posix(), path, size, used, made_by, state)


def _measured(path: Path) -> tuple[int, float]:
    """Bytes, and the latest time of any file; links are not followed. What vanishes meanwhile does not count."""
    size, used = 0, 0.0
    with contextlib.suppress(OSError):
        used = path.lstat().st_mtime
    files: Iterable[Path] = (path,)
    if path.is_dir() and not path.is_symlink():
        files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in files:
        with contextlib.suppress(OSError):
            status = file.lstat()
            size += status.st_size
            used = max(used, status.st_atime, status.st_mtime)
    return size, used
