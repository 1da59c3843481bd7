"""Ten thousand connections: more than a server lets in are told so, and one that may have them serves them all."""

import asyncio
import contextlib
import resource
import time
from collections import Counter

from tests.load.bench import Bench, say
from tests.load.client import Connection
from tests.load.server import Server, serving

_BODY = b'{"prompt": "w3 w4", "max_tokens": 2, "ignore_eos": true}'
#: Descriptors of this process beside those of connections.
_OTHERS = 256
#: How many connect at the same moment; the system keeps about a thousand that nobody has accepted.
_AT_ONCE = 500
_LONGEST_S = 600.0


def connections(bench: Bench) -> None:
    """Raises AssertionError for a client without an answer, and for a server that does not serve on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, bench.connections + _OTHERS)), hard))
    with serving(bench.settings) as server:
        found = asyncio.run(_all(server.port, bench.connections))
        say(f"{bench.connections} connections to a server that holds {bench.settings.max_connections}: {_words(found)}")
        assert found.keys() <= {200, 429, 503} and found[200] and found.total() == bench.connections, found
        _serves_on(server)
    with serving(bench.settings, "--max-connections", bench.connections) as server:
        before, began = server.held_bytes(), time.monotonic()
        found = asyncio.run(_all(server.port, bench.connections, patient=True))
        more = (server.peak_bytes - before) / bench.connections
        seconds = time.monotonic() - began
        say(f"as many to a server that holds them, asked again after 429: {_words(found)} in {seconds:.1f} s")
        say(f"{more / 1024:.1f} KiB each")
        assert found == {200: bench.connections}, found
        _serves_on(server)


async def _all(port: int, count: int, patient: bool = False) -> Counter[int]:
    """How many got which status. Each asks once it is connected, and stays until all have asked; `patient` ones ask
    once all are connected, and again where they are sent away."""
    turn, everybody = asyncio.Semaphore(_AT_ONCE), asyncio.Barrier(count)

    async def one() -> int:
        connection = Connection(port)
        async with turn:
            with contextlib.suppress(OSError):  # asking says so
                await connection.open()
            status = 429 if patient else await _ask(connection)
        await everybody.wait()
        while patient and status == 429:
            if (status := await _ask(connection)) == 429:
                await asyncio.sleep(1.0)
        connection.leave()
        return status

    async with asyncio.timeout(_LONGEST_S):
        return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def _ask(connection: Connection) -> int:
    """The status of an answer; 0 for none."""
    try:
        with contextlib.suppress(ConnectionError):  # the answer may be there although nobody reads the question
            await connection.ask("/v1/completions", _BODY, "one-of-many")
        reply = await connection.reply()
        async for _ in connection.pieces(reply):
            pass
    except (OSError, EOFError):
        return 0
    return reply.status


def _serves_on(server: Server) -> None:
    found = asyncio.run(_all(server.port, 1))
    assert found == {200: 1}, f"it serves on with {found}"
    assert server.get("/status")["pending"] == 0
    assert not any("Traceback" in line for line in server.said), "".join(server.said)


def _words(found: Counter[int]) -> str:
    return ", ".join(f"{count} got {status or 'no answer'}" for status, count in sorted(found.items()))
