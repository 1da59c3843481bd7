"""What a link gives, measured through it: messages there and back, and a bulk send over one connection of TCP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


def measure(near: Path, far: Path, far_address: str, deadline: float) -> LinkRates:
    """Between two namespaces; `far_address` is that of the second. It takes about 50 times the delay. Raises OSError,
    TimeoutError where it is not done at `deadline` on the clock `time.monotonic`."""
    with _connection(near, far, far_address, deadline) as (here, there):
        trips = [_trip(here, there, deadline) for _ in range(1 + _EXCHANGES)][1:]
        bits_s = _bulk(here, there, _BULK_S + _BULK_TRIPS * min(trips), deadline)
    return LinkRates(tuple(trip / 2 for trip in trips), bits_s)


def _patience(deadline: float) -> float:
    """How long one operation of a socket may take, in seconds. Raises TimeoutError after the deadline."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("out of time")
    return min(_PATIENCE_S, left)


@contextmanager
def _connection(
    near: Path, far: Path, far_address: str, deadline: float
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection between two namespaces."""
    with ExitStack() as opened:
        listener = opened.enter_context(inside(far, lambda: socket.create_server((far_address, 0))))
        to = (far_address, listener.getsockname()[1])
        here = opened.enter_context(inside(near, lambda: socket.create_connection(to, _patience(deadline))))
        listener.settimeout(_patience(deadline))
        there = opened.enter_context(listener.accept()[0])
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield here, there


def _trip(here: socket.socket, there: socket.socket, deadline: float) -> float:
    """Seconds of a byte's way there and back. One thread can do both ends, as each waits for the other."""
    for end in (here, there):
        end.settimeout(_patience(deadline))
    start = time.perf_counter()
    here.send(b"x")
    there.send(there.recv(1))
    here.recv(1)
    return time.perf_counter() - start


def _bulk(here: socket.socket, there: socket.socket, seconds: float, deadline: float) -> float:
    """Bits/s that arrive while data is sent for some seconds. Raises OSError where too little does to tell, or not all
    does before the deadline."""

    def send() -> None:
        piece, end = bytes(_PIECE), time.perf_counter() + seconds
        with suppress(OSError):  # the receiver raises
            while time.perf_counter() < end:
                here.sendall(piece)
            here.shutdown(socket.SHUT_WR)

    here.settimeout(None)
    sender = threading.Thread(target=send)
    sender.start()
    arrived: list[tuple[float, int]] = []
    buffer, count = bytearray(4 * _PIECE), 1
    try:
        while count:
            there.settimeout(_patience(deadline))
            count = there.recv_into(buffer)
            arrived += [(time.perf_counter(), count)] if count else []
    finally:
        with suppress(OSError):  # it has ended by itself, but for an error here
            here.shutdown(socket.SHUT_RDWR)
        sender.join()
    if len(arrived) < 2:
        raise OSError(f"{sum(count for _, count in arrived)} bytes arrived in one piece")
    (first, _), (last, _) = arrived[0], arrived[-1]
    middle = (first + last) / 2
    latter = [(at, count) for at, count in arrived if at >= middle]
    begun = latter[0][0]
    return 8 * sum(count for at, count in latter if at > begun) / (last - begun)
