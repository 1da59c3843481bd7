"""What a server is started with."""

from dataclasses import dataclass
from pathlib import Path

#: The most bytes of a request's body, and of a file that is uploaded.
MAX_BODY, MAX_UPLOAD = 16 << 20, 200 << 20


@dataclass(frozen=True)
class ServeSettings:
    """The options of `harness serve`, as `BatchJob` has those of a job.

    `max_sequence`: the most tokens of a request, prompt and new ones; None for as many as model and memory allow.
    `max_pending`: requests that are queued or running; more are sent away. `api_key`: what clients must send; None for
    any. `drain_s`: how long running requests may go on after SIGTERM. `keep_alive_s`: seconds of silence after which a
    stream says that it is alive. `max_connections`: clients that are connected at a time; `patience_s`: how long one
    may ask nothing at first, or not read its answer. `files`: the folder of files and batches; None for one of its
    port, in the cache.
    """

    model: str
    engine: str
    memory: str | None
    overrides: tuple[str, ...]
    cache: Path
    host: str = "127.0.0.1"
    port: int = 8000
    max_sequence: int | None = None
    max_tokens: int = 256
    max_pending: int = 1024
    api_key: str | None = None
    drain_s: float = 30.0
    keep_alive_s: float = 15.0
    max_connections: int = 1024
    patience_s: float = 60.0
    files: Path | None = None
