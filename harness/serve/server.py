"""A server from its start to its end: the model loaded, the port bound, requests answered, and drained on SIGTERM."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import uvicorn

from harness import registry
from harness.api import HarnessError, OnlineEngine, UnsupportedError
from harness.batch.generate import public_name
from harness.batch.job import Lengths, Progress, answered_by, engine_errors, job_cell
from harness.batch.session import ModelSession, longest_request
from harness.common.garbage import leave_what_exists
from harness.common.scratch import remove_abandoned
from harness.serve.app import make_app
from harness.serve.batches import Batches, batches_of
from harness.serve.connections import connection_class, reserve_descriptors
from harness.serve.engine_loop import EngineLoop
from harness.serve.served import Served
from harness.serve.settings import ServeSettings

#: Tokens of a usual request, prompt and new ones, and of these the new ones: what memory is planned for. Longer ones
#: run too, fewer at once.
_USUAL, _USUAL_NEW = 1024, 256
#: Connections that the system keeps until they are accepted.
_BACKLOG = 1024
#: Seconds for which the thread that serves connections may keep Python's lock from the engine's, which releases it at
#: each product of a pass and needs it for the next one. Python's own 5 ms are a tenth of a small model's pass.
_SWITCH_S = 5e-4


def serve(settings: ServeSettings, progress: Progress) -> None:
    """Serves until SIGINT or SIGTERM; then requests in flight have `drain_s` to end.

    Raises HarnessError for an address that is taken and a model that cannot be loaded, InfeasibleError where the memory
    holds not even a short request, UnsupportedError for an engine that takes no requests while it runs.
    """
    cell = job_cell(settings.model, settings.engine, settings.memory, settings.overrides, progress.note)
    reserve_descriptors(settings.max_connections)
    listener = _listen(settings.host, settings.port)  # before minutes of loading
    remove_abandoned(settings.cache)
    with closing(listener), closing(ModelSession(cell, settings.cache, progress)) as session:
        engine, longest = online_engine(session, settings)
        leave_what_exists()
        sys.setswitchinterval(_SWITCH_S)
        host, port = listener.getsockname()[:2]
        folder = settings.files or settings.cache / "served" / str(port)
        name, shape, text = public_name(cell.model.id), session.model.shape, session.text

        def identity(advance: Callable[[int, int], None]) -> str:
            return answered_by(cell, registry.identity(cell.engine, session.model, settings.cache, advance))

        with closing(text), running(engine, settings.max_pending) as loop:
            served = Served(engine, loop, name, shape, text, longest, settings)
            window = max(1, min(cell.policy.gpu_batch_size, settings.max_pending // 2))
            with batches_of(served, folder, window, identity, progress.note) as batches:
                address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
                listener.listen(_BACKLOG)  # who reads the note may connect
                progress.note(f"{name} is served at {address}, requests of up to {longest} tokens; Ctrl-C ends it")
                asyncio.run(_Server(served, batches, progress.note).run(listener))


def online_engine(session: ModelSession, settings: ServeSettings) -> tuple[OnlineEngine, int]:
    """The engine of a session, loaded for usual requests, and the most tokens of a request. Raises as `serve` does."""
    cell = session.cell
    longest = longest_request(settings.max_sequence, cell, session.model)
    with engine_errors(cell.engine):
        usual = min(longest, _USUAL)
        lengths = Lengths(longest, usual, min(_USUAL_NEW, usual))
        engine = session.engine(lengths, cell.policy.gpu_batch_size)
    if not isinstance(engine, OnlineEngine):
        raise UnsupportedError(f"engine {cell.engine} takes no requests while it runs; serve with engine offload")
    return engine, longest


@contextlib.contextmanager
def running(engine: OnlineEngine, most_pending: int) -> Iterator[EngineLoop]:
    """The engine's loop; in the end its requests are cancelled."""
    loop = EngineLoop(engine, most_pending)
    try:
        yield loop
    finally:
        try:
            loop.close()
        except KeyboardInterrupt:  # a pass cannot be broken off, and uses what would be freed now
            os._exit(130)


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone: uvicorn's own handlers end at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """The HTTP server. The first signal lets running requests end, a second one does not wait for them."""

    def __init__(self, served: Served, batches: Batches, note: Callable[[str], None]) -> None:
        self._served, self._note = served, note
        config = uvicorn.Config(
            make_app(served, batches), log_level="warning", access_log=False, lifespan="off", proxy_headers=False,
            timeout_graceful_shutdown=5, h11_max_incomplete_event_size=64 << 10,
            http=connection_class(served.settings.max_connections, served.settings.patience_s),
        )  # fmt: skip
        self._uvicorn = _Uvicorn(config)
        self._signals = 0

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in handlers:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._stop))
        try:
            await self._uvicorn.serve([listener])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._served.loop.close(timeout_s=0)  # a batch's requests, too
            self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _drain(self) -> None:
        pending = self._served.loop.pending
        if pending:
            self._note(f"{pending} requests have {self._served.settings.drain_s:g} s to end; again to end at once")
        drained = await asyncio.to_thread(self._served.loop.close, True, self._served.settings.drain_s)
        if not drained:
            await asyncio.to_thread(self._served.loop.close)
        self._uvicorn.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as exc:  # the last: no host has such a name
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise HarnessError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from exc
    return listener
