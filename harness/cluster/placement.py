"""How much of a cluster each worker of a job gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.api import HarnessError, RunSpec


@dataclass(frozen=True)
class Node:
    """A node of the cluster: Ray's id, its name (its address, unless `ray start` gave one), and the resources that Ray
    counts there, such as CPU, GPU and memory in bytes."""

    id: str
    name: str
    resources: Mapping[str, float] = field(default_factory=dict)

    def room(self, need: Mapping[str, float]) -> int:
        """How many that need these resources fit."""
        return min(int(self.resources.get(name, 0.0) // amount) for name, amount in need.items() if amount)


def worker_needs(cell: RunSpec, nodes: Sequence[Node], workers: int) -> dict[str, float]:
    """What Ray reserves for each worker: its memory limit, a device where the cell uses one, and cores: as many as the
    cell has threads, else as many as leave room for all workers.

    Raises HarnessError where the cluster has no room for so many.
    """
    ranks = cell.policy.ranks  # all of them on the worker's node
    fixed = {"memory": float(ranks * (cell.limits.host_memory or 0)), "GPU": float(cell.limits.gpu)}
    most = max((int(node.resources.get("CPU", 0)) for node in nodes), default=0)
    asked = cell.limits.threads and ranks * cell.limits.threads

    def room(cores: int) -> int:
        return sum(node.room({**fixed, "CPU": cores}) for node in nodes)

    cores = next((n for n in ([asked] if asked else range(most, 0, -1)) if room(n) >= workers), None)
    if cores is None:
        raise HarnessError(_no_room(workers, asked or 1, fixed, len(nodes), room))
    return {**fixed, "CPU": float(cores)}


def _no_room(workers: int, cores: int, fixed: Mapping[str, float], nodes: int, room: Callable[[int], int]) -> str:
    device = ", a device" if fixed["GPU"] else ""
    each = f"{cores} core{'s' if cores > 1 else ''}{device} and {fixed['memory'] / 2**30:.1f} GiB"
    return (
        f"the cluster of {nodes} nodes has room for {room(cores)} workers of {each} each, not for {workers}: give "
        "fewer --workers or less --memory, or start more nodes"
    )
