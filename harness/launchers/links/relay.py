"""A switch that delays every frame by the same time, for kernels without netem.

It forwards Ethernet frames between packet sockets, so connections of any protocol pass as they are, and TCP sees the
delay as it would that of a long line.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

#: What the kernel puts before a frame (struct virtio_net_hdr): which offloads its checksum and its segments still need.
OFFLOADS = 10
#: A frame with its offloads: 64 KiB of segments with their headers at most.
_LONGEST = 1 << 17
#: Frames of one port that are taken before others, and what is due, get their turn.
_TURN = 64
#: Of linux/if_packet.h and asm/socket.h, which Python does not name.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _SO_RCVBUFFORCE = 263, 15, 23, 33
_ETH_P_ALL = 3
_BUFFER_BYTES = 32 << 20


def packet_port(interface: str) -> socket.socket:
    """A socket for all frames of an interface, each with OFFLOADS bytes before it: so segments that the sender's kernel
    did not separate stay together, and few large frames cross. Raises OSError."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        port.bind((interface, _ETH_P_ALL))
    except OSError:
        port.close()
        raise
    return port


def relay(ports: Mapping[bytes, socket.socket], delay_s: float, until: int) -> None:
    """Forwards frames between `ports`, by the Ethernet address behind each, `delay_s` after they came and in that
    order, until the descriptor `until` can be read."""
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    sources = list(ports.values())
    watched: list[socket.socket | int] = [*sources, until]
    buffer = memoryview(bytearray(_LONGEST))
    for port in sources:
        port.setblocking(False)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        # select's timeout has microseconds, that of epoll milliseconds
        readable, _, _ = select.select(watched, [], [], patience)
        if until in readable:
            return
        for port in sources:
            if port in readable:
                _take(port, ports, buffer, time.monotonic() + delay_s, waiting)
        while waiting and waiting[0][0] <= time.monotonic():
            _, targets, frame = waiting.popleft()
            for target in targets:
                with suppress(OSError):  # a network that cannot take a frame drops it
                    target.send(frame)


def _take(
    port: socket.socket, ports: Mapping[bytes, socket.socket], buffer: memoryview, due: float,
    waiting: deque[tuple[float, list[socket.socket], bytes]],
) -> None:  # fmt: skip
    """Adds the frames that are there at a port to those that wait."""
    for _ in range(_TURN):
        try:
            length = port.recv_into(buffer)
        except OSError:
            return
        frame = bytes(buffer[:length])
        to = frame[OFFLOADS : OFFLOADS + 6]
        if to in ports:
            waiting.append((due, [ports[to]], frame))
        elif to and to[0] & 1:  # to a group, such as all
            waiting.append((due, [other for other in ports.values() if other is not port], frame))
