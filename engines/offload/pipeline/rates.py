"""What a rank tells of its machine when it joins."""

from __future__ import annotations

from dataclasses import dataclass

from engines.offload.pipeline.clocks import clock_name


@dataclass(frozen=True)
class Machine:
    """A rank's machine. clock: names the clock of its host, so the host."""

    clock: str

    @classmethod
    def here(cls) -> Machine:
        """This process's."""
        return cls(clock_name())
