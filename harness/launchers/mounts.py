"""What a container sees of this host's files: the mounts, and its work with the paths inside."""

import stat
from dataclasses import replace
from pathlib import Path

from docker.types import Mount

from harness.api import EngineWork, RunCell

#: Paths in a container: the exchange folder, the cache, the model's files, and other input files.
WORK, CACHE, _MODEL, _INPUTS = "/harness/work", "/harness/cache", "/harness/model", "/harness/inputs"


def translated(work: EngineWork, exchange: Path, cache: Path) -> tuple[EngineWork, list[Mount]]:
    """The work with its paths inside the container, and the mounts that put its files there.

    A mount of type bind refuses a source that does not exist (`volumes=` would create it, as root) and accepts sources
    with colons and spaces. Each file of a model folder is mounted by itself, as hub folders hold links to elsewhere.
    """
    mounts = [Mount(WORK, str(exchange), type="bind"), Mount(CACHE, str(cache), type="bind")]

    def read_only(inside: str, source: Path) -> str:
        mounts.append(Mount(inside, str(source.resolve()), type="bind", read_only=True))
        return inside

    if work.model and work.model.path:
        folder = Path(work.model.path)
        inside = f"{_MODEL}/{folder.name}"
        for file in _files(folder):
            read_only(f"{inside}/{file.name}", file)
        work = replace(work, model=replace(work.model, path=inside))
    if trace := work.spec.workload.trace:
        workload = replace(work.spec.workload, trace=read_only(f"{_INPUTS}/trace", Path(trace)))
        work = replace(work, spec=replace(work.spec, workload=workload))
    if isinstance(work, RunCell) and work.questions is not None:
        work = replace(work, questions=Path(read_only(f"{_INPUTS}/questions", work.questions)))
    return replace(work, cache=Path(CACHE)), mounts


def unreadable(work: EngineWork, user: int, group: int) -> str:
    """The name of the model's first file that this user may not read; empty if the user may read all."""
    for file in _files(Path(work.model.path)) if work.model and work.model.path else ():
        status = file.stat()
        by_user, by_group = status.st_uid == user, status.st_gid == group
        needed = stat.S_IRUSR if by_user else stat.S_IRGRP if by_group else stat.S_IROTH
        if not status.st_mode & needed:
            return file.name
    return ""


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.exists())  # no broken links
