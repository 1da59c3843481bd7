"""What the lanes share: a model and how it is served, how many ask how much, and a folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.common.units import parse_size
from harness.serve.settings import ServeSettings
from tests.load.in_process import Outcome, asked_directly
from tests.load.questions import Question


@dataclass
class Bench:
    """`model` None is a small one with the offload engine, `fake` the fake engine's. `cancelled`: the share of clients
    that leave; `turns`: of a comparison; `connections`: how many are opened; `body_mib`: of a body that is too large;
    `seconds`: how long a slow client reads.
    """

    folder: Path
    engine: str = "fake"
    model: str | None = None
    memory: str = "256MiB"
    overrides: tuple[str, ...] = ()
    clients: int = 200
    requests: int = 10_000
    cancelled: float = 1 / 3
    seed: int = 0
    turns: int = 3
    connections: int = 10_000
    body_mib: int = 100
    seconds: float = 60.0

    @cached_property
    def settings(self) -> ServeSettings:
        """Of the server."""
        return ServeSettings(self._model, self.engine, self.memory, self._overrides, self._cache)

    @property
    def memory_bytes(self) -> int:
        """What the server may hold beside its idle process."""
        return parse_size(self.memory)

    def directly(self, questions: Sequence[Question]) -> Outcome:
        """The answers of the engine without a server, as many at a time as there are clients."""
        return asked_directly(self.settings, questions, self.clients, self.folder)

    @cached_property
    def _cache(self) -> Path:
        cache = self.folder / "cache"
        if self.engine == "offload":
            from tests.offload import with_kernels  # imports torch

            with_kernels(cache)
        return cache

    @cached_property
    def _model(self) -> str:
        if self.model is not None:
            return self.model
        if self.engine == "fake":
            return "fake"
        from tests.offload import save_with_tokenizer  # imports torch

        return str(save_with_tokenizer(self.folder / "tiny"))

    @property
    def _overrides(self) -> tuple[str, ...]:
        """Sums in float32: a greedy choice must not hang on who shares the pass."""
        exact = () if self.engine == "fake" else ("policy.compute_dtype=float32",)
        return (*exact, *self.overrides)


def say(text: str) -> None:
    """A line of what a lane found."""
    sys.stdout.write(f"  {text}\n")
    sys.stdout.flush()
