"""The process that holds the network of a launch's ranks: `python -m harness.launchers.links.process RANKS RATE DELAY`.

It makes a namespace for each rank, and one with a switch between them; says on its standard output where they are; and
ends when its standard input does. The namespaces have no names, so whatever ends it and the ranks, nothing is left.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.common.rank_network import INTERFACE, address
from harness.launchers.links.namespaces import enter, make_namespace
from harness.launchers.links.relay import packet_port, relay

#: Frames of 1500 bytes up to this rate, in bits/s; above it of 9000, which cost a relay a sixth of the time.
_JUMBO = 250_000_000
#: What may wait for its turn on a link before it is dropped: more than any window of TCP. Bytes.
_QUEUE_BYTES = 64 << 20
_BRIDGE = "switch"


class CommandError(Exception):
    """`ip` or `tc` failed; the text says which command, and what it printed."""


def main(argv: Sequence[str]) -> int:
    """Makes `argv[0]` ranks' links of `argv[1]` bits/s (0: no limit) and `argv[2]` seconds. Says in a line of JSON: the
    `namespaces` by rank and the `way` of the delay, or the `problem`."""
    ranks, rate, delay_s = int(argv[0]), int(argv[1]), float(argv[2])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # frames must not wait for the ranks' arithmetic
    try:
        spaces = [make_namespace() for _ in range(ranks)]
        switch = make_namespace()
        _make_links(spaces, switch, rate)
        ports = _connected(ranks, delay_s)
    except (OSError, CommandError) as exc:
        _tell({"problem": str(exc)})
        return 1
    way = "a relay process" if ports else "netem" if delay_s else "a bridge"
    _tell({"namespaces": [f"/proc/{os.getpid()}/fd/{space}" for space in spaces], "way": way})
    if ports:
        relay(ports, delay_s, sys.stdin.fileno())
    else:
        select.select([sys.stdin], [], [])
    return 0


def _tell(told: Mapping[str, object]) -> None:
    """Says it to the harness, which reads one line."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _make_links(spaces: Sequence[int], switch: int, rate: int) -> None:
    """A pair of interfaces for each rank, one end in its namespace, the other in the switch's, where this thread is
    before and after. Each rank's end sends `rate` bits/s at most."""
    frame = 1500 if 0 < rate <= _JUMBO else 9000
    with suppress(OSError):  # a kernel without IPv6; with it, switches would send what nobody asked for
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    pairs = [
        f"link add {_port(rank)} mtu {frame} type veth peer name {INTERFACE} address {_hardware(rank).hex(':')} "
        f"mtu {frame} netns /proc/{os.getpid()}/fd/{space}\nlink set {_port(rank)} up"
        for rank, space in enumerate(spaces)
    ]
    _run(["ip", "-batch", "-"], "\n".join(pairs))
    for rank, space in enumerate(spaces):
        enter(space)
        try:
            with suppress(OSError):
                Path(f"/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6").write_text("1")
            lines = [f"addr add {address(rank)}/16 dev {INTERFACE}", "link set lo up", f"link set {INTERFACE} up"]
            _run(["ip", "-batch", "-"], "\n".join(lines))
            if rate:
                # The bucket is what may pass at once: little beside a message, but two frames at least.
                bucket = max(2 * (frame + 14), rate // 8 // 10_000)
                tbf = f"rate {rate}bit burst {bucket} limit {_QUEUE_BYTES}"
                _run(["tc", *f"qdisc add dev {INTERFACE} root tbf {tbf}".split()])
        finally:
            enter(switch)


def _connected(ranks: int, delay_s: float) -> dict[bytes, socket.socket]:
    """Connects the switch's interfaces by the kernel's bridge, with netem for the delay; or returns the ports that a
    relay has to connect, by the addresses behind them, where the kernel has no netem."""
    netem = f"root netem delay {round(delay_s * 1e6)}us limit 1000000"
    if delay_s:
        try:
            for rank in range(ranks):
                _run(["tc", *f"qdisc add dev {_port(rank)} {netem}".split()])
        except CommandError:
            return {_hardware(rank): packet_port(_port(rank)) for rank in range(ranks)}
    lines = [f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"]
    _run(["ip", "-batch", "-"], "\n".join([*lines, *(f"link set {_port(r)} master {_BRIDGE}" for r in range(ranks))]))
    return {}


def _port(rank: int) -> str:
    """The switch's end of a rank's link."""
    return f"rank{rank}"


def _hardware(rank: int) -> bytes:
    """The Ethernet address of a rank's end: a local one."""
    return bytes((2, 0, 0, 0)) + rank.to_bytes(2, "big")


def _run(command: Sequence[str], lines: str = "") -> None:
    """Runs a command in this thread's namespace, with `lines` on its standard input. Raises CommandError."""
    done = subprocess.run(command, check=False, input=lines, text=True, capture_output=True)
    if done.returncode != 0:
        raise CommandError(f"{' '.join(command)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
