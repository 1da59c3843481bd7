"""What a link gives, measured through it: messages there and back, and a bulk send over one connection of TCP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.launchers.links.namespaces import inside

#: Messages there and back, after a first one that does not count.
_EXCHANGES = 8
#: How long data is sent: some seconds' part, and round trips in which TCP finds its window.
_BULK_S, _BULK_TRIPS = 0.4, 16
_PIECE = 1 << 16
#: When a link that carries nothing counts as broken.
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class LinkRates:
    """Of a link: seconds from end to end, half of each message's way there and back; and bits/s of a bulk send, over
    the latter half of its time."""

    delays_s: tuple[float, ...]
    bits_s: float


def measure(near: Path, far: Path, far_address: str) -> LinkRates:
    """Between two namespaces; `far_address` is that of the second. Raises OSError."""
    with _connection(near, far, far_address) as (here, there):
        trips = [_trip(here, there) for _ in range(1 + _EXCHANGES)][1:]
        bits_s = _bulk(here, there, _BULK_S + _BULK_TRIPS * min(trips))
    return LinkRates(tuple(trip / 2 for trip in trips), bits_s)


@contextmanager
def _connection(near: Path, far: Path, far_address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection between two namespaces."""
    with ExitStack() as opened:
        listener = opened.enter_context(inside(far, lambda: socket.create_server((far_address, 0))))
        listener.settimeout(_PATIENCE_S)
        to = (far_address, listener.getsockname()[1])
        here = opened.enter_context(inside(near, lambda: socket.create_connection(to, _PATIENCE_S)))
        there = opened.enter_context(listener.accept()[0])
        there.settimeout(_PATIENCE_S)
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield here, there


def _trip(here: socket.socket, there: socket.socket) -> float:
    """Seconds of a byte's way there and back. One thread can do both ends, as each waits for the other."""
    start = time.perf_counter()
    here.send(b"x")
    there.send(there.recv(1))
    here.recv(1)
    return time.perf_counter() - start


def _bulk(here: socket.socket, there: socket.socket, seconds: float) -> float:
    """Bits/s that arrive while data is sent for some seconds. Raises OSError where too little does to tell."""

    def send() -> None:
        piece, end = bytes(_PIECE), time.perf_counter() + seconds
        while time.perf_counter() < end:
            here.sendall(piece)
        here.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    arrived: list[tuple[float, int]] = []
    buffer = bytearray(4 * _PIECE)
    while count := there.recv_into(buffer):
        arrived.append((time.perf_counter(), count))
    sender.join()
    if len(arrived) < 2:
        raise OSError(f"{sum(count for _, count in arrived)} bytes arrived in one piece")
    (first, _), (last, _) = arrived[0], arrived[-1]
    middle = (first + last) / 2
    latter = [(at, count) for at, count in arrived if at >= middle]
    begun = latter[0][0]
    return 8 * sum(count for at, count in latter if at > begun) / (last - begun)
