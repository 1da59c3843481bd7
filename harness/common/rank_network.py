"""The network namespaces that the ranks of an engine enter, as whoever made them tells the engine's process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: A rank's end of its link, in its namespace.
INTERFACE = "link0"
#: The environment variable with the namespaces' files, by rank.
_VARIABLE = "HARNESS_RANK_NAMESPACES"


def address(rank: int) -> str:
    """A rank's address in its namespace."""
    return f"10.0.{(rank + 1) >> 8}.{(rank + 1) & 0xFF}"


def told(namespaces: Sequence[Path]) -> Mapping[str, str]:
    """The environment that tells an engine, and gloo in its ranks, of the network."""
    return {_VARIABLE: os.pathsep.join(map(str, namespaces)), "GLOO_SOCKET_IFNAME": INTERFACE}


def in_namespace(namespace: Path, command: Sequence[str]) -> list[str]:
    """The command line that starts `command` inside a network namespace; the process is the same."""
    return ["nsenter", f"--net={namespace}", *command]


def in_own_namespace(rank: int, command: Sequence[str]) -> list[str]:
    """The command line that starts a rank's `command`, inside its namespace if there is one."""
    return in_namespace(_namespaces()[rank], command) if is_linked() else list(command)


def is_linked() -> bool:
    """Whether ranks have namespaces of their own."""
    return bool(_namespaces())


def leader_address() -> str:
    """Where other ranks that rank 0 starts reach it."""
    return address(0) if is_linked() else "127.0.0.1"


def _namespaces() -> list[Path]:
    return [Path(name) for name in os.environ.get(_VARIABLE, "").split(os.pathsep) if name]
