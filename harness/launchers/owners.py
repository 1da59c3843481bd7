"""The owners of containers: a harness removes those of harnesses of this host that were killed."""

import contextlib
import os
import platform
import re
from pathlib import Path

import docker
import psutil
from docker.errors import DockerException

#: The label with a container's owner: host, process namespace, process id, and start time of that process.
OWNER = "offload-harness.owner"
_OWNER = re.compile(r"(?P<place>.*)/(?P<pid>\d+)@(?P<began>.*)")


def remove_abandoned(client: docker.DockerClient) -> None:
    """Removes containers of harnesses of this host that no longer run."""
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        match = _OWNER.fullmatch(container.labels[OWNER])
        if match and match["place"] == place() and not lives(int(match["pid"]), match["began"]):
            with contextlib.suppress(DockerException):
                container.remove(force=True)


def owner() -> str:
    """This process, for the label of its containers."""
    return f"{place()}/{os.getpid()}@{began(os.getpid())}"


def place() -> str:
    """Host and pid namespace: in another namespace, such as a container's, the same pid is another process."""
    space = ""
    with contextlib.suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{space}"


def lives(pid: int, start: str) -> bool:
    """Whether the process `pid` that began at `start` still runs, or may do so."""
    return psutil.pid_exists(pid) and began(pid) in (start, "")


def began(pid: int) -> str:
    """A process's start in ticks since boot, which tells apart processes that reused a pid; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""
