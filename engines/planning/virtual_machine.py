"""A machine with a device in virtual time: each resource does one thing at a time, in the order in which it is asked.

That order is the program's, never the times': so a faster resource never makes a program end later.
"""

from collections.abc import Sequence

import numpy as np

from engines.planning.closed_form import RESOURCES, Seconds

#: The resources, as numbers: places in a vector of seconds.
DEVICE, HOST, H2D, D2H, DISK = range(len(RESOURCES))


class VirtualMachine:
    """The resources of one machine, all idle at time 0."""

    def __init__(self) -> None:
        self._free = [0.0] * len(RESOURCES)
        self._busy = [0.0] * len(RESOURCES)

    @property
    def end(self) -> float:
        """When the last of the work ends."""
        return max(self._free)

    @property
    def used(self) -> Seconds:
        """Busy seconds of each resource so far."""
        return np.array(self._busy)

    def free(self, resource: int) -> float:
        """When a resource has done all that it was asked."""
        return self._free[resource]

    def run(self, resource: int, seconds: float, ready: float) -> float:
        """When work ends that may begin at time `ready`; at once if it takes no time."""
        if not seconds:
            return ready
        end = max(self._free[resource], ready) + seconds
        self._free[resource] = end
        self._busy[resource] += seconds
        return end

    def chain(self, seconds: Seconds, order: Sequence[int], ready: float, pieces: int = 1) -> float:
        """When work ends that passes through the resources of `order`: `seconds` [resources] of them, in equal pieces,
        which follow each other as on a conveyor."""
        takes: list[float] = seconds.tolist()
        used = [resource for resource in order if takes[resource]]
        count = pieces if len(used) > 1 else 1  # what takes one resource is not worth cutting
        end = ready
        for _ in range(count):
            end = ready
            for resource in used:
                end = self.run(resource, takes[resource] / count, end)
        return end
