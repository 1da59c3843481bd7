"""What a server serves."""

import time
from dataclasses import dataclass, field

from harness.api import ModelShape, OnlineEngine
from harness.api.task import Text
from harness.serve.engine_loop import EngineLoop
from harness.serve.settings import ServeSettings


@dataclass
class Served:
    """A loaded engine in its loop, and the model's name, shape and tokenizer.

    `longest`: the most tokens of a request. `ready`: whether requests are let in; false once it shuts down.
    """

    engine: OnlineEngine
    loop: EngineLoop
    name: str
    shape: ModelShape
    text: Text
    longest: int
    settings: ServeSettings
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> bool:
        return not self.loop.closed and not self.loop.failure
