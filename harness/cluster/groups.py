"""The cells of a suite that are compared with each other, and which node measures which of them: all on one node."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from harness.api import HardwareRequirements, RunRecord, RunSpec, to_json
from harness.cluster.placement import Node
from harness.run.steps import Step, possible
from harness.run.store import is_done


@dataclass
class Group:
    """Cells of one model and one workload. `node`: the label of the node that measured what there is of them, empty
    where there is nothing; `done`: the records that settle a launch; `mixed`: there are records of several nodes or of
    a run without Ray, which settle nothing, as they would be compared with each other; `losses`: tasks that were lost.
    """

    cells: tuple[RunSpec, ...]
    node: str = ""
    done: list[RunRecord] = field(default_factory=list)
    mixed: bool = False
    losses: int = 0

    @property
    def todo(self) -> list[Step]:
        """The launches that are left, in order."""
        settled = {(record.fingerprint, record.repeat) for record in self.done}
        return [s for s in possible(self.cells, self.done) if (s.cell.fingerprint(), s.repeat) not in settled]


def group(cells: Sequence[RunSpec], latest: Mapping[tuple[str, int], RunRecord]) -> list[Group]:
    """All groups of `cells`, with what the `latest` records, by fingerprint and repeat, settle of them."""
    members: dict[str, list[RunSpec]] = {}
    for cell in cells:
        members.setdefault(json.dumps(to_json([cell.model, cell.workload]), sort_keys=True), []).append(cell)
    groups = []
    for together in members.values():
        by_fingerprint = {cell.fingerprint(): cell for cell in together}
        known = [record for record in latest.values() if record.fingerprint in by_fingerprint]
        nodes = {str(record.provenance.get("node", "")) for record in known}
        if len(nodes) > 1 or "" in nodes:
            groups.append(Group(tuple(together), mixed=True))
            continue
        done = [record for record in known if is_done(record, by_fingerprint[record.fingerprint])]
        groups.append(Group(tuple(together), nodes.pop() if nodes else "", done))
    return groups


def choose(groups: Sequence[Group], label: str, alive: Collection[str]) -> Group | None:
    """What an idle node measures next: what it began, else what nobody did, else what a node began that is gone."""
    waiting = [group for group in groups if group.todo]
    for chosen in (
        [group for group in waiting if group.node == label],
        [group for group in waiting if not group.node],
        [group for group in waiting if group.node not in alive],
    ):
        if chosen:
            return chosen[0]
    return None


def fits(need: HardwareRequirements, node: Node) -> bool:
    """Whether a node has what a suite requires, as far as Ray counts it."""
    has = node.resources
    return (
        has.get("CPU", 0.0) >= max(1, need.cores)
        and has.get("memory", 0.0) >= need.host_memory
        and (not need.device_memory or has.get("GPU", 0.0) >= 1)
        and (not need.machine or has.get(need.machine, 0.0) > 0)
    )


def in_words(need: HardwareRequirements) -> str:
    """What `fits` asks of a node."""
    parts = [f"{max(1, need.cores)} cores", f"{need.host_memory / 2**30:.1f} GiB"]
    parts += ["a device"] if need.device_memory else []
    parts += [f"the resource {need.machine}"] if need.machine else []
    return ", ".join(parts)


def label(node: Node) -> str:
    """What records call a node: names and addresses of machines are not for sharing."""
    return hashlib.sha256(node.name.encode()).hexdigest()[:8]
