"""The memory cgroups that the ranks of an engine enter, as whoever made the groups tells the engine's process."""

import os
from collections.abc import Sequence
from pathlib import Path

#: The environment variable with the groups' `cgroup.procs`, by rank.
_VARIABLE = "HARNESS_RANK_GROUPS"


def told(procs: Sequence[Path]) -> dict[str, str]:
    """The environment that tells an engine of its ranks' groups."""
    return {_VARIABLE: os.pathsep.join(map(str, procs))}


def in_group(procs: Path, command: Sequence[str]) -> list[str]:
    """The command line that starts `command` inside the group with this `cgroup.procs`."""
    # The shell enters the group before it becomes the command, so no byte is charged elsewhere.
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command]


def in_own_group(rank: int, command: Sequence[str]) -> list[str]:
    """The command line that starts a rank's `command`, inside its group if there is one."""
    groups = os.environ.get(_VARIABLE, "").split(os.pathsep)
    return in_group(Path(groups[rank]), command) if rank < len(groups) and groups[rank] else list(command)
